"""A Grid in one process that trains a cohort in one set of kernels."""

from __future__ import annotations

import gc
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from logging import INFO
from typing import Any
from weakref import WeakKeyDictionary

import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from torch import nn

from flwr_regs.cohort.batch_plan import CannotStack
from flwr_regs.flower.app import ClientFn, NumPyClientApp, client_app
from flwr_regs.flower.grids.in_process import InProcessGrid, numbered
from flwr_regs.flower.grids.stacked_clients import Cohort, SharedModel
from flwr_regs.flower.grids.stacked_group import Candidate, Group
from flwr_regs.flower.mods import ContextMod
from flwr_regs.wire import keys
from flwr_regs.wire.errors import described

ALONE = "no other client of the cohort is like it"
STACKED = ("train", keys.PROBE)
SLOWER = "a stack of such clients is slower"
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}


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
    measure : bool, optional
        Whether a few clients of the first rounds train both ways, and the others in the faster one from
        then on. Default: for models with convolutions or recurrent layers on a CPU. Two runs may then
        differ by rounding.

    Attributes
    ----------
    fallbacks : dict of str to int
        Why clients have trained by themselves -> how often, over all rounds.

    Raises
    ------
    ValueError
        No client; no memory; an unknown precision.

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
        measure: bool | None = None,
    ) -> None:
        super().__init__(client_app, num_clients, run_config, workers=workers)
        if memory < 1:
            raise ValueError(f"memory must be a number of bytes, at least 1, not {memory}")
        if precision not in PRECISIONS:
            expected = ", ".join(PRECISIONS)
            raise ValueError(f"precision must be one of {expected}, not {precision!r}")
        self._memory, self._precision = memory, PRECISIONS[precision]
        self._measure = measure
        self._paces: dict[Hashable, Pace] = {}
        self._for_workers: list[Message] = []
        self._owners: MutableMapping[nn.Module, int] = WeakKeyDictionary()
        self._rests = False
        self.fallbacks: dict[str, int] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients; their replies wait for `pull_messages`."""
        with self._no_collection():
            return self._pushed([numbered(message) for message in messages])

    def _pushed(self, messages: Sequence[Message]) -> list[str]:
        training = [m for m in messages if m.metadata.message_type in STACKED]
        if len(training) > 1 and (why := self._refusal()):
            self._note(CannotStack(why), len(training))
            training = []
        cohort, waiting = Cohort(training, self._precision, self._owners), set[int]()
        self._for_workers.clear()  # of a push that was interrupted
        for message in messages:
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
        return [message.metadata.message_id for message in messages]

    @contextmanager
    def _no_collection(self) -> Iterator[None]:
        """Let Python's garbage collector rest: a stack's clients live until all have trained.

        It would look at them again and again, and at all of torch's and Flower's objects in most rounds.
        """
        self._rests = rests = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            self._rests = False
            if rests:
                gc.enable()

    def _serve(self, message: Message, app: ClientApp) -> str:
        """Run a client by itself, and collect what it leaves behind."""
        if not self._rests:
            return super()._serve(message, app)
        gc.enable()
        try:
            return super()._serve(message, app)
        finally:
            gc.disable()

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

    def _admit(self, cohort: Cohort, message: Message) -> None:
        """Put a message's client into a group, or run it at once."""
        assert isinstance(self._app, NumPyClientApp)
        context = self._contexts[message.metadata.dst_node_id]
        before = {key: record.copy() for key, record in context.state.items()}
        try:
            seen = context
            for mod in self._app.own_mods:
                seen = mod.change(message, seen)  # type: ignore[attr-defined]
            client: Any = self._app.client_fn(seen)
        except Exception as error:  # whatever the user's code raises: once more, for its message
            raised = error

            def again(_: Any) -> Any:
                raise raised

            self._serve_alone(message, again, before)
            return
        try:
            key = cohort.admit(message, context, client, before)
        except Exception as error:  # by itself it says what is wrong, if anything is
            if isinstance(error, SharedModel):
                self._train_owners(cohort, error)
            self._note(error)
            self._serve_alone(message, partial(_given, client), before)
            return
        if cohort.groups[key].is_full(self._memory):
            self._train(cohort.groups.pop(key))

    def _train_owners(self, cohort: Cohort, error: SharedModel) -> None:
        """Train the clients that have the same model, one by one, before the next has it."""
        for key, group in list(cohort.groups.items()):
            if any(c.client.model is error.model for c in group.candidates):
                self._note(error, len(group.candidates))
                self._one_by_one(cohort.groups.pop(key).candidates)

    def _train(self, group: Group) -> None:
        """Train a group; if that fails, one by one."""
        pace = self._pace(group)
        if not pace.stacks:
            self._note(CannotStack(SLOWER), len(group.candidates))
            self._one_by_one(group.candidates)
            return
        alone, began = group.part(pace.trial), time.perf_counter()
        candidates = group.candidates
        try:
            if len(candidates) == 1:
                raise CannotStack(ALONE)
            replies = group.run()
        except Exception as error:  # whatever torch or a hook raises under vmap
            self._note(error, len(candidates))
            self._one_by_one([*candidates, *alone])
            return
        for c, reply in zip(candidates, replies, strict=True):
            self._keep(c.message, reply)
        if alone:
            between = time.perf_counter()
            self._one_by_one(alone)
            self._run_workers()
            seconds = between - began, time.perf_counter() - between
            pace.note(seconds[0] / len(candidates), seconds[1] / len(alone))

    def _pace(self, group: Group) -> Pace:
        """Return what is known of the speed of clients of a kind."""
        measure = group.may_lose if self._measure is None else self._measure
        return self._paces.setdefault(group.kind, Pace()) if measure else Pace(0)

    def _one_by_one(self, candidates: Sequence[Candidate]) -> None:
        # Before any of them changes what others have too; each puts back what was its own.
        stale = [c.is_stale() for c in candidates]
        for c in candidates:
            if any(stale) and isinstance(self._app, NumPyClientApp):  # it is made once more
                c.context.state = RecordDict(dict(c.before))
                self._serve_alone(c.message, self._app.client_fn, c.before)
            else:
                self._serve_alone(c.message, partial(_given, c.client), c.before)

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
            log(INFO, "StackedGrid: clients train one by one: %s", why)
        self.fallbacks[why] = self.fallbacks.get(why, 0) + clients


@dataclass
class Pace:
    """How fast clients of one kind train both ways.

    Attributes
    ----------
    trials : int
        How often both ways are still to be tried; the first time warms up.
    stacks : bool
        Whether stacked is faster, as far as is known.
    """

    trials: int = 2
    stacks: bool = True

    @property
    def trial(self) -> int:
        """How many clients of the next stack train by themselves."""
        return 2 if self.trials else 0

    def note(self, stacked: float, alone: float) -> None:
        """Take the seconds of a client both ways."""
        self.trials -= 1
        if not self.trials:
            self.stacks = stacked <= alone
            log(
                INFO,
                "StackedGrid: a client takes %.3g s in a stack, %.3g s by itself: from now on %s",
                *(stacked, alone, "in stacks" if self.stacks else "one by one"),
            )


def _given(client: Any, _: Any) -> Any:
    """Return a client that is there already, as `client_fn`."""
    return client
