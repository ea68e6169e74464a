"""A Grid in one process that trains a cohort in one set of kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Literal

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp

from flwr_regs.cohort.batch_plan import CannotStack
from flwr_regs.cohort.stack_groups import Settings
from flwr_regs.cohort.stacks import Stacks
from flwr_regs.flower.app import NumPyClientApp
from flwr_regs.flower.grids.grid_network import ours_alone
from flwr_regs.flower.grids.in_process import InProcessGrid
from flwr_regs.flower.grids.local_network import TRAINING
from flwr_regs.flower.simulated_clients import Clients
from flwr_regs.server.exchange.network import Network
from flwr_regs.term import COUNT, SWITCH

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}
MESSAGES = "the strategy, or the grid, has methods of its own for messages"


class StackedGrid(InProcessGrid):
    """Serve clients in this process; those of a cohort that can do so train as one.

    Their models are stacked, and every kernel works on all of them (``torch.func.vmap``). The results are
    those of :class:`InProcessGrid`, up to rounding. A client that cannot be stacked trains by itself, in
    the same round; the log says why, each reason once.

    Parameters
    ----------
    client_app, num_clients, run_config, workers
        As for :class:`InProcessGrid`. An app of :func:`flwr_regs.client_app` without mods makes each client
        once, by its `client_fn`. With `Clients`, each of the workers trains a stack of its own; the results
        are the same, but for the masks of dropout. The workers also evaluate, and train the clients that
        train by themselves.
    memory : int, optional
        Bytes that a stack may take, roughly; a larger cohort trains in several. Default: 64 MiB on a CPU,
        whose caches hold no more, and 1 GiB elsewhere. A model trains by itself if two of it take more.
    precision : {"float32", "bfloat16"}
        ``"bfloat16"`` runs the forward pass in torch's autocast: faster on a GPU, less exact.
    check : "first", int or False
        When two clients of a kind also train alone, to compare the results: in a training's first round
        that stacks the kind, every so many rounds, or never. If they differ beyond rounding, the whole kind
        trains one by one from then on, in this round too, and a warning says which entry differs.
    compile : bool
        Run the steps of a stack under ``torch.compile``. Compiling takes seconds, once for each shape of a
        stack; without a C++ compiler the log says so, and training goes on as without it.

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
    ``FedAvg(seed=7).start(grid=StackedGrid(clients), initial_arrays=arrays, ...)``
    """

    def __init__(
        self,
        client_app: ClientApp | Clients,
        num_clients: int | None = None,
        run_config: Mapping[str, Any] | None = None,
        *,
        workers: int = 1,
        memory: int | None = None,
        precision: str = "float32",
        check: Literal["first", False] | int = "first",
        compile: bool = False,
    ) -> None:
        super().__init__(client_app, num_clients, run_config, workers=workers)
        given: Any = memory
        if memory is not None and not (isinstance(given, Real) and memory >= 1):
            raise ValueError(f"memory must be a number of bytes, at least 1, not {memory!r}")
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
        if check != "first" and check is not False and not COUNT.fits(check):
            raise ValueError(f"check must be 'first', a number of rounds or False, not {check!r}")
        SWITCH.check(type(self).__name__, "compile", compile)
        self._stacks = Stacks(Settings(memory, PRECISIONS[precision], check, compile))
        self._local.stacks = self._stacks

    @property
    def fallbacks(self) -> dict[str, int]:
        """Why clients have trained by themselves -> how often, over all rounds."""
        return self._stacks.fallbacks

    def network(self) -> Network | None:
        """Return a network without messages, of the method served; None where messages are needed."""
        return None if self._refusal() else self._local

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients one by one; their replies wait for `pull_messages`."""
        sent = list(messages)
        training = sum(m.metadata.message_type in TRAINING for m in sent)
        if training > 1 and not self._local.asking:
            self._stacks.note(CannotStack(self._refusal() or MESSAGES), training)
        return super().push_messages(sent)

    def _refusal(self) -> str:
        """Return why no client of this app stacks; "" if some may."""
        if not ours_alone(self):
            return MESSAGES
        if isinstance(self._source, Clients):
            return ""
        if not isinstance(self._source, NumPyClientApp):
            return "only an app of client_app(client_fn) shows its clients"
        return "the app has mods" if self._source.own_mods else ""
