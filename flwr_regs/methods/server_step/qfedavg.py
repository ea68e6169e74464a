"""q-FedAvg: clients with a high loss weigh more, so that accuracy is spread more evenly.

| *Init*       nothing
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← ClientOpt(v, ∇f_k(v))``
| *Upload*     ``v_k`` and ``F_k = F_k(w_t)``, the mean loss over all its data
| *Update*     ``w ← w + Σ_k ω_k (v_k − w_t)``,  ``ω_k = L F_k^q / Σ_j h_j``,
|              ``h_j = q F_j^{q−1} ‖L (v_j − w_t)‖² + L F_j^q``,  ``L = 1/η``

η is the round's learning rate, also where a client's optimiser has another one, or momentum: L is not
theirs then, and how much a high loss counts changes with it.

It minimises ``Σ_k F_k^{q+1} / (q + 1)``. q = 0 is FedAvg with uniform weights; p_k plays no part, but for
buffers. ‖·‖ is over all trained parameters as one vector. F_k is taken in eval mode. If no client has a
loss, the model stays as it is.

What a client may claim: F_k counts as at most 100 times the cohort's median, and for q < 1, where
``F^{q−1}`` is unbounded, as at least 1/100 of it, and 1e-12. So ``ω_k`` is at most ``100^q`` times the
median client's, and ``0 ≤ ω_k``, ``Σ ω_k ≤ 1`` whatever the losses and updates. A client that claims that
much steers the training, as an honest one with such a loss does; a large update makes the step shorter.
With a robust aggregator, M times the median of the h_j stands for their sum, and no ω_k is above 1: the
others' weights hardly depend on one client's claim, and its own update is the aggregator's to judge. A
negative loss has no power, and costs its client the reply.

Source: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning" (2020), Alg. 2
(q-FedAvg), with the Lipschitz constant L of q = 0 as 1/η. Weights are uniform at q = 0, so ``weighting`` is
"uniform".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flwr_regs.abilities import Checks, Weighs
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.uploads import check_arrays
from flwr_regs.term import NOT_NEGATIVE, Arrays, ClientContext, Ranges, ServerContext, Slot, Term

__all__ = ["FairWeights", "QFedAvg", "QFedAvgClient"]

LEAST = 1e-12
"""What a loss counts at least, where q < 1."""
FAR = 100.0
"""How many times the median a loss counts at most; where q < 1, this part of it is the least."""
HIGHEST = 1e100
"""What ``(F_k / median F)^q`` counts at most; beside it the other weights are 0 to rounding."""
NO_LOSS = 1e-100
"""A median loss below this is no unit to count in."""


@dataclass(frozen=True)
class FairWeights(Term, Weighs, Checks):
    """q-FedAvg's weights of the updates.

    Parameters
    ----------
    q : float
        q ≥ 0: the larger, the more a high loss counts; 0 is FedAvg with uniform weights.
    """

    name: ClassVar[str] = "qfedavg"
    robust: ClassVar[bool] = True
    keeps_delta: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"q": NOT_NEGATIVE}
    q: float

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {"loss": ctx.mean_loss(ctx.start).double()}, {}

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        check_arrays(upload, {"loss": ("floats", ())})
        if not upload["loss"] >= 0:
            loss = float(upload["loss"])
            raise ValueError(f"a mean loss of {loss:.3g}, but its power needs at least 0")

    def weigh(
        self, weights: Mapping[int, float], uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> dict[int, float]:
        q, count = self.q, len(uploads)
        floor, least = (LEAST, 1 / FAR) if q < 1 else (0.0, 0.0)
        losses = {k: max(float(u["loss"]), floor) for k, u in uploads.items()}
        unit = float(np.median([*losses.values()]))  # ω_k is the same in any unit of the loss
        unit = unit if unit > NO_LOSS else 1.0
        most = min(FAR, HIGHEST ** (1 / max(q, 1)))
        ratio = {k: min(max(f / unit, least), most) for k, f in losses.items()}
        norm = {k: ctx.replies[k].norm for k in ratio}  # and h_j / (L unit^q):
        h = [q * r ** (q - 1) * norm[k] ** 2 / ctx.lr / unit + r**q for k, r in ratio.items()]
        total = count * float(np.median(h) if ctx.robust else np.mean(h))
        if not total:
            return dict.fromkeys(uploads, 0.0)
        # A robust aggregator gets (ω_k / p_k) Δ_k: as p_k plays no part, that is M ω_k Δ_k
        share = {k: count * weights[k] if ctx.robust else 1.0 for k in uploads}
        return {k: share[k] * min(r**q / total, 1.0) for k, r in ratio.items()}


class QFedAvg(MethodStrategy):
    """FedAvg with weights for a fairer spread of the loss over the clients.

    Parameters
    ----------
    q : float
        See :class:`FairWeights`.
    weighting : {"uniform", "num-examples"}
        Of buffers alone.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, q: float, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([FairWeights(q)], weighting=weighting, **kwargs)


class QFedAvgClient(MethodClient):
    """The client of :class:`QFedAvg`."""

    terms = (FairWeights,)
