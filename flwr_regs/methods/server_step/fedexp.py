"""FedExP: the server extrapolates, further the more the clients' updates differ.

| *Init*       nothing
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← ClientOpt(v, ∇f_k(v))``
| *Upload*     ``v_k``
| *Update*     ``w ← w + η_g Δ̄``,  ``η_g = max(1, Σ_k ‖Δ_k‖² / (2 M (‖Δ̄‖² + ε)))``

``Δ_k = v_k − w_t``, ``Δ̄`` their mean, M the number of replies. With other weights than uniform ones,
``Σ p_k ‖Δ_k‖²`` is in place of ``Σ ‖Δ_k‖² / M``. ‖·‖ is over all trained parameters as one vector. If the
updates agree, η_g is 1, and the step FedAvg's. If they are orthogonal and equally long, it is M/2 (for a
small ε). Beside compression the updates are those that arrive: sparse ones overlap little, which makes η_g
larger.

Near a fixed point ``Δ̄`` vanishes and the single updates do not, so η_g grows up to ``Σ ‖Δ_k‖² / (2 M ε)``.
If that is too much, the last models go back and forth about the point. So the paper reports the mean of
the last two. The history has its metrics beside the model's own, as ``averaged_metrics``.

With a robust aggregator, ``Δ̄`` is its aggregate of the updates, and its aggregate of the ``‖Δ_k‖²`` is in
place of their mean: one client cannot make η_g large by a large update.

Refused: whatever weighs the updates anew (FedNova, q-FedAvg, ``incomplete="scale"``), as Δ̄ would then not
be the mean of the ``Δ_k``.

Source: Jhunjhunwala, Wang, Joshi, "FedExP: Speeding up federated averaging via extrapolation" (2023),
Alg. 1. Its server averages the clients alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flwr_regs.abilities import Averages, CountsOnMean, Steps
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.uploads import Sums
from flwr_regs.term import POSITIVE, Arrays, Ranges, ServerContext, ServerStep, Slot, Term
from flwr_regs.wire.arrays import square_sum

__all__ = ["Extrapolation", "FedExP", "FedExPClient"]


@dataclass(frozen=True)
class Extrapolation(Term, Steps, Averages, Sums, CountsOnMean):
    """FedExP's step ``η_g Δ̄``. Its server slot has the last η_g, as ``"server-lr"``.

    Parameters
    ----------
    eps : float
        ε > 0, in the units of ‖Δ̄‖²: the larger, the sooner η_g is 1.
    """

    name: ClassVar[str] = "fedexp"
    reads_lr: ClassVar[bool] = False
    ranges: ClassVar[Ranges] = {"eps": POSITIVE}
    eps: float = 1e-3

    def addends(self, pid: int, delta: Arrays, upload: Slot, ctx: ServerContext) -> Slot:
        # what is robust counts clients alike
        share = 1 / len(ctx.weights) if ctx.robust else ctx.weights[pid]
        return {"square": share * _square(delta)}

    def update(self, server: Slot, delta: Arrays, uploads: Slot, ctx: ServerContext) -> ServerStep:
        lr = np.maximum(1.0, uploads["square"] / (2 * (_square(delta) + self.eps)))
        return {"server-lr": np.asarray(lr)}, {n: float(lr) * d for n, d in delta.items()}


def _square(arrays: Arrays) -> Any:
    """Return ``‖·‖²`` in float64."""
    return np.asarray(sum(map(square_sum, arrays.values())))


class FedExP(MethodStrategy):
    """FedAvg with an adaptive server step size.

    Parameters
    ----------
    eps : float
        See :class:`Extrapolation`.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, eps: float = 1e-3, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([Extrapolation(eps)], weighting=weighting, **kwargs)


class FedExPClient(MethodClient):
    """The client of :class:`FedExP`."""
