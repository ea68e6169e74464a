"""FedDyn: dynamic regularisation, which makes each client's optimum agree with that of all.

| *Init*       ``h = 0``, and ``h_k = 0`` for every client
| *Broadcast*  ``w_t``
| *Step*       ``v ← v − η (∇f_k(v) − h_k + α (v − w_t))``, from ``v = w_t``  (Alg. 1)
| *Upload*     ``v_k``. The client keeps ``h_k ← h_k − α (v_k − w_t)``
| *Update*     ``h ← h − (α/N) Σ_{k∈S} (v_k − w_t)``, ``w ← mean v_k − h/α``

N is the population, S the replies that are used. The paper writes θ for w and ∇L_k for h_k: where the
local problem is solved exactly, h_k is the gradient of the client's loss at ``v_k``. Here clients take
their steps of SGD, or of another optimiser.

A client's h_k counts only if the server used its reply. So ``h = Σ_k h_k / N`` whoever drops out, and with
any weights: these act in the mean of the models alone. It fails if a client loses its h_k: it begins at 0,
and its old share stays in h. The history names that client. Where N is not known before, it is the number
of clients so far: h shrinks as new ones come.

With ``wire_dtype`` a client takes h_k from the rounded ``v_k``, which is what the server gets. With
compression the sum of what was sent differs from h_k by what the client has yet to send.

Under a robust aggregator the sum is n times the aggregate of the n clients whose state counts.

Source: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic
regularization" (2021), Alg. 1. Its server averages the clients alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flwr_regs.abilities import Steps
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.uploads import Sums, as_sent, grown, joined, kept, under
from flwr_regs.term import POSITIVE, Ranges, Term

__all__ = ["DynamicRegulariser", "FedDyn", "FedDynClient"]


@dataclass(frozen=True)
class DynamicRegulariser(Term, Steps, Sums):
    """FedDyn's linear term ``−⟨h_k, v⟩`` and its pull ``α/2 ‖v − w_t‖²``.

    Parameters
    ----------
    alpha : float
        Strength α > 0 of both. The explicit steps are stable while ``η (L + α) < 2``, for losses of
        curvature up to L.
    """

    name: ClassVar[str] = "feddyn"
    elementwise: ClassVar[bool] = True
    excludes: ClassVar[dict[str, str]] = {
        "scaffold": "each corrects the same drift, which would count twice: keep one"
    }
    ranges: ClassVar[Ranges] = {"alpha": POSITIVE}
    alpha: float

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return {
            n: (params[n] - ctx.start[n]).mul_(self.alpha).add_(g).sub_(ctx.client.get(n, 0.0))
            for n, g in grads.items()
        }

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        moved = as_sent(delta, ctx)
        return delta, {}, {n: ctx.client.get(n, 0.0) - self.alpha * d for n, d in moved.items()}

    def addends(self, pid: int, delta: Arrays, upload: Slot, ctx: ServerContext) -> Slot:
        return delta

    def update(self, server: Slot, delta: Arrays, uploads: Slot, ctx: ServerContext) -> ServerStep:
        # An aggregator that selects clients gives n times their mean: only their h_k count.
        rate = self.alpha / ctx.population * (ctx.counted / max(len(ctx.weights), 1))
        old, shrunk = under(server, "h."), grown(server, ctx)
        rise = {n: rate * uploads.get(n, 0.0) for n in ctx.params}
        h = {n: kept(shrunk * old.get(n, 0.0) - rise[n], w) for n, w in ctx.params.items()}
        step = {n: d - h[n] / self.alpha for n, d in delta.items()}
        return {**joined(h=h), "clients": np.array(ctx.population)}, step


class FedDyn(MethodStrategy):
    """Federated learning with dynamic regularisation (Alg. 1).

    Parameters
    ----------
    alpha : float
        See :class:`DynamicRegulariser`. The paper tries 0.1, 0.01 and 0.001.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights. The h_k always count alike.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, alpha: float, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([DynamicRegulariser(alpha)], weighting=weighting, **kwargs)


class FedDynClient(MethodClient):
    """The client of :class:`FedDyn`."""

    terms = (DynamicRegulariser,)
