"""A Grid in one process that trains a cohort in one set of kernels."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from logging import INFO, WARNING
from typing import Any, Literal

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log

from flwr_regs.cohort.batch_plan import CannotStack
from flwr_regs.flower.app import ClientFn, NumPyClientApp, client_app
from flwr_regs.flower.compat import numbered
from flwr_regs.flower.grids.in_process import InProcessGrid
from flwr_regs.flower.grids.stacked_check import difference
from flwr_regs.flower.grids.stacked_clients import Cohort
from flwr_regs.flower.grids.stacked_group import Candidate, Group, Kind
from flwr_regs.flower.mods import ContextMod
from flwr_regs.wire import keys
from flwr_regs.wire.errors import described

ALONE = "no other client of the cohort is like it"
STACKED = ("train", keys.PROBE)
KINDS = 100
"""Kinds of clients that are remembered; a model whose attributes change is of a new kind in each round."""
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}


class OtherResults(CannotStack):
    """A stack's result is not that of its clients alone."""


class StackedGrid(InProcessGrid):
    """Serve `num_clients` clients in this process; those of a cohort that can do so train as one.

    Their models are stacked, and every kernel works on all of them (``torch.func.vmap``). The results are
    those of :class:`InProcessGrid`, up to rounding. A client that cannot be stacked trains by itself, in
    the same round; the log says why, each reason once.

    Parameters
    ----------
    client_app, num_clients, run_config, workers
        As for :class:`InProcessGrid`. Only an app of :func:`flwr_regs.client_app` without mods stacks. The
        workers are for the clients that train by themselves, and for evaluations.
    memory : int
        Bytes that a stack may take, roughly; a larger cohort trains in several.
    precision : {"float32", "bfloat16"}
        ``"bfloat16"`` runs the forward pass in torch's autocast: faster on a GPU, less exact.
    check : "first", int or False
        When two clients of a kind also train alone, to compare the results: in the kind's first stacked
        round, every so many rounds, or never. If they differ beyond rounding, the whole kind trains one by
        one from then on, in this round too, and a warning says which entry differs.

    Attributes
    ----------
    fallbacks : dict of str to int
        Why clients have trained by themselves -> how often, over all rounds.

    Raises
    ------
    ValueError
        No client; no memory; an unknown precision; a wrong `check`.

    Examples
    --------
    ``FedAvg(seed=7).start(grid=StackedGrid(app, 100), initial_arrays=arrays, ...)``
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        run_config: Mapping[str, Any] | None = None,
        *,
        workers: int = 1,
        memory: int = 2**30,
        precision: str = "float32",
        check: Literal["first", False] | int = "first",
    ) -> None:
        super().__init__(client_app, num_clients, run_config, workers=workers)
        if memory < 1:
            raise ValueError(f"memory must be a number of bytes, at least 1, not {memory}")
        if precision not in PRECISIONS:
            expected = ", ".join(PRECISIONS)
            raise ValueError(f"precision must be one of {expected}, not {precision!r}")
        rounds = isinstance(check, int) and not isinstance(check, bool) and check > 0
        if check != "first" and check is not False and not rounds:
            raise ValueError(f"check must be 'first', a number of rounds or False, not {check!r}")
        self._memory, self._precision = memory, PRECISIONS[precision]
        self._check = check
        self._kinds: dict[Hashable, Kind] = {}
        self._for_workers: list[Message] = []
        self.fallbacks: dict[str, int] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients; their replies wait for `pull_messages`."""
        sent = [numbered(message) for message in messages]
        training = [m for m in sent if m.metadata.message_type in STACKED]
        if len(training) > 1 and (why := self._refusal()):
            self._note(CannotStack(why), len(training))
            training = []
        cohort, waiting = Cohort(training, self._precision, self._kinds), set[int]()
        self._for_workers.clear()  # of a push that was interrupted
        for message in sent:
            node = message.metadata.dst_node_id
            if node in waiting:  # its messages count in their order
                self._train_all(cohort)
                waiting.clear()
            if len(training) > 1 and message.metadata.message_type in STACKED:
                self._admit(cohort, message)
            elif self._workers is None:
                self._serve(message, self._app)
                continue
            else:
                self._for_workers.append(message)
            waiting.add(node)
        self._train_all(cohort)
        return [message.metadata.message_id for message in sent]

    def _train_all(self, cohort: Cohort) -> None:
        for key in list(cohort.groups):
            self._train(cohort.groups.pop(key))
        self._run_workers()

    def _run_workers(self) -> None:
        """Let the workers serve the messages that wait for them."""
        if self._workers is None or not self._for_workers:
            return
        sent, self._for_workers = self._for_workers, []
        replies = self._workers.run(sent, [self._contexts[m.metadata.dst_node_id] for m in sent])
        for message, reply in zip(sent, replies, strict=True):
            self._keep(message, reply)

    def _refusal(self) -> str:
        """Return why no client of this app stacks; "" if some may."""
        if not isinstance(self._app, NumPyClientApp):
            return "only an app of client_app(client_fn) shows its clients"
        others = [m for m in self._app.own_mods if not isinstance(m, ContextMod)]
        return "the app has mods" if others else ""

    def _made(self, message: Message, context: Context) -> Any:
        """Return the client that a message is for."""
        assert isinstance(self._app, NumPyClientApp)
        for mod in self._app.own_mods:
            context = mod.change(message, context)  # type: ignore[attr-defined]
        return self._app.client_fn(context)

    def _admit(self, cohort: Cohort, message: Message) -> None:
        """Put a message's client into a group, or run it at once."""
        context = self._contexts[message.metadata.dst_node_id]
        before = {key: record.copy() for key, record in context.state.items()}
        drawn = torch.get_rng_state()
        try:
            client = self._made(message, context)
        except Exception as error:  # whatever the user's code raises: once more, for its message
            raised = error

            def again(_: Any) -> Any:
                raise raised

            self._serve_alone(message, again, before)
            return
        try:
            key = cohort.admit(message, context, client, before, drawn)
        except Exception as error:  # by itself it says what is wrong, if anything is
            self._note(error)
            self._serve_alone(message, lambda _: client, before)
            return
        if cohort.groups[key].is_full(self._memory):
            self._train(cohort.groups.pop(key))

    def _train(self, group: Group) -> None:
        """Train a group; if that fails, or its result is not that of clients alone, one by one."""
        try:
            replies = self._stacked(group)
        except Exception as error:  # whatever torch or a hook raises under vmap
            self._note(error, len(group.candidates))
            self._one_by_one(group.candidates)
            return
        for c, reply in zip(group.candidates, replies, strict=True):
            self._keep(c.message, reply)

    def _stacked(self, group: Group) -> list[Message]:
        """Return the replies of a group's clients; raise whatever forbids that they train together."""
        kind = group.kind
        if kind.refused:
            raise CannotStack(kind.refused)
        if len(group.candidates) == 1:
            raise CannotStack(ALONE)
        this_round = int(group.recipe.config[keys.ROUND_KEY])
        self._kinds[kind.like] = kind
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]
        if self._check is not False and this_round >= kind.due:
            if where := difference(group, self._made_anew):
                kind.refused = f"{where} between a stack and a client alone: see docs/stacked.md"
                raise OtherResults(kind.refused)
            kind.due = math.inf if self._check == "first" else this_round + self._check
        return group.replies(group.run())

    def _made_anew(self, candidate: Candidate, context: Context | None = None) -> Any:
        """Return a candidate's client as `client_fn` makes it; `context` is a copy if it is not given."""
        held = candidate.context
        if context is None:
            state = RecordDict({key: record.copy() for key, record in candidate.before.items()})
            ids = held.run_id, held.node_id, held.node_config
            context = Context(*ids, state, held.run_config)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(candidate.drawn)
            return self._made(candidate.message, context)

    def _one_by_one(self, candidates: Sequence[Candidate]) -> None:
        """Run clients by themselves; each is made once more, as others may have changed what it holds."""
        for c in candidates:
            c.context.state = RecordDict(dict(c.before))
            self._serve_alone(c.message, partial(self._made_anew, c), c.before)

    def _serve_alone(
        self, message: Message, client_fn: ClientFn, before: Mapping[str, Any]
    ) -> None:
        """Run a client that was made, or has raised. If it fails, its state is as `before` it was made.

        A worker makes it once more.
        """
        context = self._contexts[message.metadata.dst_node_id]
        if self._workers is not None:
            context.state = RecordDict(dict(before))
            self._for_workers.append(message)
            return
        self._serve(message, client_app(client_fn))
        if self._replies[message.metadata.message_id].has_error():
            context.state = RecordDict(dict(before))

    def _note(self, error: Exception, clients: int = 1) -> None:
        """Count clients that train by themselves, and log the reason once."""
        why = str(error) if isinstance(error, CannotStack) else described(error)
        if why not in self.fallbacks and why != ALONE:
            level = WARNING if isinstance(error, OtherResults) else INFO
            log(level, "StackedGrid: clients train one by one: %s", why)
        self.fallbacks[why] = self.fallbacks.get(why, 0) + clients
