"""FedAMP: each client starts from a model of its own, in which the server mixes those of similar clients.

| *Init*       nothing
| *Broadcast*  ``w_t``, and to client k its cloud model, once it has a v_k:
|              ``u_k = (1 − Σ_{j≠k} ξ_kj) v_k + Σ_{j≠k} ξ_kj v_j``,  ``ξ_kj = α A'(‖v_k − v_j‖²)``,
|              ``A'(x) = e^{−x/σ}/σ``
| *Step*       from ``v = u_k``: ``v ← v − η (∇f_k(v) + (λ/α) (v − u_k))``
| *Upload*     ``v_k``, ``n_k``. The client keeps v_k as its own model, and evaluates it
| *Update*     the server keeps v_k. ``w_{t+1}``, which the paper does not have, is the mean of the v_k

The paper has all clients in every round (Alg. 1). Here the sums run over all clients of which the server
ever used a reply, each with its last v_k. A client without one starts at ``w_t``. Clients keep v_k only for
evaluations: one that lost it evaluates the global model until its next round; the history names it.

**Memory**: the server holds N models, and sends each client two. So it is for a few clients (cross-silo).

**Strength**: σ is a squared distance between models. A client moves another's u_k by at most
``α/√(2eσ)``, however far away its own model is, so that a hostile one cannot drag it. Above
``α = σ/(N − 1)`` the ξ of a client can sum to more than 1; they are then scaled to 1, which the paper rules
out by a small α. The paper's defaults are for its own models; ours, λ = α = 0.1 and σ = 1, are a start.

Source: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized cross-silo federated learning on non-IID
data" (2021), Alg. 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_regs.abilities import Addresses, Checks, Folds, Personalises
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.uploads import check_arrays, joined
from flwr_regs.term import NOT_NEGATIVE, POSITIVE, Ranges, Term
from flwr_regs.wire.arrays import square_sum

__all__ = ["CloudModel", "FedAMP", "FedAMPClient"]


@dataclass(frozen=True)
class CloudModel(Term, Folds, Addresses, Personalises, Checks):
    """A start for each client, mixed of its model and those of similar clients (Alg. 1).

    Parameters
    ----------
    lam : float
        λ ≥ 0: local steps are pulled to the cloud model with strength λ/α.
    alpha : float
        α > 0, the step with which the server moves each client's model towards the others'.
    sigma : float
        σ > 0, the squared distance at which clients stop to count as similar.
    """

    name: ClassVar[str] = "fedamp"
    keeps: ClassVar[str] = "always"
    keeps_update: ClassVar[bool] = True
    keeps_delta: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    robust: ClassVar[bool] = True
    excludes: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            *("scaffold", "fedadc", "gradient-tracking", "feddyn"),
            *("fednova", "qfedavg", "fedexp", "mime"),
        ),
        "FedAMP starts a client's steps elsewhere than at w_t, which the other counts from: keep one",
    )
    ranges: ClassVar[Ranges] = {"lam": NOT_NEGATIVE, "alpha": POSITIVE, "sigma": POSITIVE}
    lam: float = 0.1
    alpha: float = 0.1
    sigma: float = 1.0

    def broadcast_to(self, pid: int, server: Slot, ctx: ServerContext) -> Slot:
        models: dict[str, Arrays] = {}
        for key, v in server.items():
            who, _, name = key.partition(".")
            if name in ctx.params:
                models.setdefault(who, {})[name] = v
        if (model := models.pop(f"v{pid}", None)) is None:
            return {}
        xi = {who: self._similarity(model, other) for who, other in models.items()}
        most = max(sum(xi.values()), 1.0)
        return {
            n: v + sum(x / most * (models[who][n] - v) for who, x in xi.items())
            for n, v in model.items()
        }

    def _similarity(self, model: Arrays, other: Arrays) -> float:
        """Return ``ξ = α A'(‖v_k − v_j‖²)``, where A is the paper's ``1 − e^{−x/σ}``."""
        x = sum(square_sum(v - other[n]) for n, v in model.items())
        return self.alpha * math.exp(-x / self.sigma) / self.sigma

    def start(self, params: Arrays, ctx: ClientContext) -> Arrays:
        if not (u := ctx.broadcast):
            return params
        # with what a term on the left has added to w_t
        return {n: u[n] + (p - ctx.start[n]) for n, p in params.items()}

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        u, pull = ctx.broadcast or ctx.start, self.lam / self.alpha
        return {n: (params[n] - u[n]).mul_(pull).add_(g) for n, g in grads.items()}

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {}, {n: ctx.start[n] + d for n, d in delta.items()}

    def personal(self, params: Arrays, ctx: ClientContext) -> Arrays:
        return {n: ctx.client.get(n, p) for n, p in params.items()}

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        check_arrays(upload, {})

    def fold(
        self, acc: Slot, pid: int, delta: Arrays, upload: Slot, weight: float, ctx: ServerContext
    ) -> Slot:
        v = {n: (ctx.params[n] + d).astype(ctx.params[n].dtype) for n, d in delta.items()}
        acc |= joined(**{f"v{pid}": v})
        return acc

    def update(self, server: Slot, delta: Arrays, uploads: Slot, ctx: ServerContext) -> ServerStep:
        return {**server, **uploads}, delta


class FedAMP(MethodStrategy):
    """Personalised models that attract those of similar clients.

    Parameters
    ----------
    lam, alpha, sigma : float
        See :class:`CloudModel`.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self, lam: float = 0.1, alpha: float = 0.1, sigma: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__([CloudModel(lam, alpha, sigma)], **kwargs)


class FedAMPClient(MethodClient):
    """The client of :class:`FedAMP`."""

    terms = (CloudModel,)
