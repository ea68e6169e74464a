"""VRL-SGD and FedGATE: each client tracks how far its own direction is from the mean of all.

| *Init*       ``d_k = 0`` for every client
| *Broadcast*  ``w_t``; to each client ``w̄ − w`` of the last round in which its reply was used
| *Step*       ``v ← v − η (∇f_k(v) − d_k)``
| *Upload*     ``v_k``
| *Update*     ``w̄ = Σ p_k v_k``, ``d_k ← d_k + (w̄ − v_k)/(K_k η)``;
|              VRL-SGD: ``w ← w̄``; FedGATE: ``w ← w + γ (w̄ − w)``

A client cannot know w̄ when it sends ``v_k``. It keeps ``d_k − (v_k − w_t)/(K_k η)`` and ``1/(K_k η)``, and
completes d_k when it gets ``w̄ − w_t``, in its next round, however late that is. Until then the server
keeps the ``w̄ − w`` of that round: one model if all take part, at most one for each client. If the reply
was not used, the client goes on with what it had, and gets what that needs.

w̄ is the mean before any step size: FedGATE's γ, or a server optimiser, which stands on the term's left.
VRL-SGD with all clients in every round, each with the same number of steps, is SCAFFOLD's option 2, where
``d_k = c_k − c``.

The d_k of clients that take equally many steps sum to 0, so that the method settles at the minimum of all
clients' loss. With unequal K_k only ``Σ p_k K_k d_k`` is 0, and clients with more steps count more there.
This is so in the papers' formulas, which have one K. A client that lost its d_k begins at 0, and the sum
is no longer 0: the history names that client.

The clients need plain SGD: what ``(w̄ − v_k)/(K_k η)`` is changes with momentum, Adam or clipping. SGD's
weight decay is part of the gradient: with it, these are the methods on the L2-regularised loss. Refused
too: whatever weighs the updates anew (``incomplete="scale"``, FedNova, q-FedAvg). With a robust aggregator
or with noise, w̄ is what the server has made of the updates. The d_k then do not sum to 0, and the methods
settle elsewhere.

Sources: Liang, Shen, Liu, Pan, Chen, Cheng, "Variance reduced local SGD with lower communication
complexity" (2019), Alg. 1; Haddadpour, Kamani, Mokhtari, Mahdavi, "Federated learning with compression:
unified analysis and sharp guarantees" (2021), Alg. 2 without compression. Both average the clients
alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flwr_regs.abilities import Addresses, CountsOnMean
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.sgd import CountsOnSGD
from flwr_regs.methods.parts.uploads import as_sent
from flwr_regs.term import POSITIVE, Arrays, ClientContext, Ranges, ServerContext, ServerStep, Slot

__all__ = ["VRLSGD", "FedGATE", "FedGATEClient", "GradientTracking", "VRLSGDClient"]


@dataclass(frozen=True)
class GradientTracking(CountsOnSGD, CountsOnMean, Addresses):
    """The correction ``−d_k`` of each gradient, and FedGATE's step size γ.

    Parameters
    ----------
    server_lr : float
        γ > 0, by which the server multiplies ``w̄ − w``; 1 is VRL-SGD.
    """

    name: ClassVar[str] = "gradient-tracking"
    elementwise: ClassVar[bool] = True
    counts_on_sgd: ClassVar[str] = (
        "gradient tracking (VRL-SGD, FedGATE) takes a client's drift from its steps of plain SGD, but {}: "
        "leave it out"
    )
    excludes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("scaffold", "feddyn"), "each corrects the same drift, which would count twice: keep one"
    )
    ranges: ClassVar[Ranges] = {"server_lr": POSITIVE}
    server_lr: float = 1.0

    def _drift(self, name: str, ctx: ClientContext) -> Any:
        """Return one parameter's d_k, complete; 0 if the client keeps none."""
        if (kept := ctx.client.get(f"d.{name}")) is None:
            return 0.0
        return kept + (ctx.client["rate"] * ctx.broadcast[name]).to(kept.dtype)

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return {n: g - self._drift(n, ctx) for n, g in grads.items()}

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        moved = as_sent(delta, ctx)
        rate = next(iter(moved.values())).new_ones(()) / (ctx.num_steps * ctx.lr)
        kept = {f"d.{n}": self._drift(n, ctx) - rate.to(d.dtype) * d for n, d in moved.items()}
        return delta, {}, {**kept, "rate": rate}

    def broadcast_to(self, pid: int, server: Slot, ctx: ServerContext) -> Slot:
        if (last := server.get(f"last.{pid}")) is None:
            return {}
        return {n: server[f"{int(last)}.{n}"] for n in ctx.params if f"{int(last)}.{n}" in server}

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> ServerStep:
        last = {key: a for key, a in server.items() if key.startswith("last.")}
        last |= {f"last.{pid}": np.array(ctx.round) for pid in uploads}  # whose state counts
        awaited = {str(int(a)) for a in last.values()}
        means = {key: a for key, a in server.items() if key.partition(".")[0] in awaited}
        if uploads:
            means |= {f"{ctx.round}.{n}": np.array(d) for n, d in delta.items()}  # w̄ − w_t
        return {**last, **means}, {n: self.server_lr * d for n, d in delta.items()}


class VRLSGD(MethodStrategy):
    """Variance reduced local SGD (Liang et al. 2019, Alg. 1).

    Parameters
    ----------
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([GradientTracking()], weighting=weighting, **kwargs)


class VRLSGDClient(MethodClient):
    """The client of :class:`VRLSGD`."""

    terms = (GradientTracking,)


class FedGATE(MethodStrategy):
    """Federated averaging with local gradient tracking (Haddadpour et al. 2021).

    Parameters
    ----------
    server_lr : float
        γ > 0, the server's step size.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self, server_lr: float = 1.0, *, weighting: str = "uniform", **kwargs: Any
    ) -> None:
        super().__init__([GradientTracking(server_lr)], weighting=weighting, **kwargs)


class FedGATEClient(MethodClient):
    """The client of :class:`FedGATE`."""

    terms = (GradientTracking,)
