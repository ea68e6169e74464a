"""A Grid in one process that trains a cohort in one set of kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from logging import INFO
from typing import Any

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from flwr_regs.client.plan import CannotStack
from flwr_regs.flower.app import NumPyClientApp, client_app
from flwr_regs.flower.grid import InProcessGrid
from flwr_regs.flower.mods import ContextMod
from flwr_regs.flower.stacked_clients import Cohort, Group
from flwr_regs.wire.errors import described

ALONE = "no other client of the cohort is like it"
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}


class StackedGrid(InProcessGrid):
    """Serve `num_clients` clients in this process; those of a cohort that can do so train as one.

    Their models are stacked, and every kernel works on all of them (``torch.func.vmap``). The results are
    those of :class:`InProcessGrid`, up to rounding. A client that cannot be stacked trains by itself, in
    the same round; the log says why, each reason once.

    Parameters
    ----------
    client_app, num_clients, run_config
        As for :class:`InProcessGrid`. Only an app of :func:`flwr_regs.client_app` without mods stacks.
    memory : int
        Bytes that a stack may take, roughly; a larger cohort trains in several.
    precision : {"float32", "bfloat16"}
        ``"bfloat16"`` runs the forward pass in torch's autocast: faster on a GPU, less exact.

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
        memory: int = 2**30,
        precision: str = "float32",
    ) -> None:
        super().__init__(client_app, num_clients, run_config)
        if memory < 1:
            raise ValueError(f"memory must be a number of bytes, at least 1, not {memory}")
        if precision not in PRECISIONS:
            expected = ", ".join(PRECISIONS)
            raise ValueError(f"precision must be one of {expected}, not {precision!r}")
        self._memory, self._precision = memory, PRECISIONS[precision]
        self.fallbacks: dict[str, int] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients; their replies wait for `pull_messages`."""
        messages = list(messages)
        ids = [self._numbered(message) for message in messages]
        training = [m for m in messages if m.metadata.message_type == "train"]
        if len(training) > 1 and (why := self._refusal()):
            self._note(CannotStack(why), len(training))
            training = []
        cohort = Cohort(training, self._precision)
        for message in messages:
            if len(training) > 1 and message.metadata.message_type == "train":
                self._admit(cohort, message)
            else:
                self._serve(message, self._app)
        for key in list(cohort.groups):
            self._train(cohort.groups.pop(key))
        return ids

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
        try:
            seen = context
            for mod in self._app.own_mods:
                seen = mod.change(message, seen)  # type: ignore[attr-defined]
            client: Any = self._app.client_fn(seen)
        except Exception as error:  # whatever the user's code raises: once more, for its message
            raised = error

            def again(_: Any) -> Any:
                raise raised

            self._serve(message, client_app(again, self._app.own_mods))
            return
        try:
            key = cohort.admit(message, context, client)
        except Exception as error:  # by itself it says what is wrong, if anything is
            self._note(error)
            self._serve(message, client_app(partial(_given, client), self._app.own_mods))
            return
        if cohort.groups[key].is_full(self._memory):
            self._train(cohort.groups.pop(key))

    def _train(self, group: Group) -> None:
        """Train a group; if that fails, one by one."""
        candidates = group.candidates
        try:
            if len(candidates) == 1:
                raise CannotStack(ALONE)
            replies = group.run()
        except Exception as error:  # whatever torch or a hook raises under vmap
            self._note(error, len(candidates))
            for c in candidates:
                self._serve(c.message, client_app(partial(_given, c.client)))
            return
        for c, reply in zip(candidates, replies, strict=True):
            self._replies[c.message.metadata.message_id] = reply

    def _note(self, error: Exception, clients: int = 1) -> None:
        """Count clients that train by themselves, and log the reason once."""
        why = str(error) if isinstance(error, CannotStack) else described(error)
        if why not in self.fallbacks and why != ALONE:
            log(INFO, "StackedGrid: clients train one by one: %s", why)
        self.fallbacks[why] = self.fallbacks.get(why, 0) + clients


def _given(client: Any, _: Any) -> Any:
    """Return a client that is there already, as `client_fn`."""
    return client
