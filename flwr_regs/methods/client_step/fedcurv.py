"""FedCurv: a pull to the other clients' last models, weighted by their Fisher information.

| *Init*       nothing: round 1 is FedAvg's
| *Broadcast*  ``U = Σ_k u_k`` and ``V = Σ_k v̂_k`` over the last round's replies, as float32; to each
|              client, whether its own are in these sums
| *Step*       ``v ← v − η (∇f_k(v) + 2 λ ((U − u_k) ⊙ v − (V − v̂_k)))`` (Eq. 6)
| *Upload*     ``u_k = diag F_k(v_k)``, as float32; the client keeps it and ``v̂_k = u_k ⊙ v_k``. It uploads
|              v̂_k too if the update is compressed or travels in half precision
| *Update*     as FedAvg; computes ``v̂_k = u_k ⊙ (w_t + Δ_k)`` if it did not come; keeps the sums ``U``
|              and ``V``, and whose they are

A client subtracts its own u_k and v̂_k only if the server used its reply in the last round. An older u_k is
not in U, and ``U − u_k`` could be negative: the pull would push. If a client has lost what it kept, its own
share stays in the sums. Under a robust aggregator the sums are robust ones, of which no client's share can
be subtracted: its own stays in.

For v̂_k the server needs each client's own update, which secure aggregation would hide.

EFL's elastic term (efl.py) has half this strength, and its sums include the client's own share.
``implicit=True`` is our addition, as there: it divides by ``1 + 2 η λ (U − u_k)``.

Source: Shoham et al., "Overcoming forgetting in federated learning on non-IID data" (2019), Eqs. 4-6. The
paper has no word on partial participation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flwr_regs.abilities import Addresses
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.fisher_sums import FisherSums
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy

__all__ = ["Curvature", "FedCurv", "FedCurvClient"]


@dataclass(frozen=True)
class Curvature(FisherSums, Addresses):
    """The gradient of ``λ Σ_{i≠k} (v − v_i)ᵀ diag(F_i) (v − v_i)``, the v_i of the last round (Eq. 4).

    Parameters
    ----------
    lam : float
        Strength λ ≥ 0. With 0 it is FedAvg, and no Fisher information is computed or sent.
    fisher_samples : int, optional
        Compute the Fisher information over at most this many of a client's samples.
    implicit : bool
        As for :class:`Elastic`: ours, not the paper's.
    """

    name: ClassVar[str] = "fedcurv"
    elementwise: ClassVar[bool] = True
    excludes: ClassVar[tuple[str, ...]] = ("elastic",)
    times: ClassVar[float] = 2.0  # (v − v_i)² has no ½ before it

    def broadcast_to(self, pid: int, server: Slot, ctx: ServerContext) -> Slot:
        return {"used": np.isin(pid, server["ids"])} if "ids" in server else {}

    def sums(self, name: str, ctx: ClientContext) -> tuple[Any, Any]:
        u, v = super().sums(name, ctx)
        if f"U.{name}" not in ctx.client:
            return u, v
        used, client = ctx.broadcast["used"], ctx.client
        rest = (u - used * client[f"U.{name}"]).clamp(min=0)  # rounding can make it negative
        return rest, v - used * client[f"V.{name}"]

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        measured = self.measured(delta, ctx)
        return delta, self.uploaded({k: a.clone() for k, a in measured.items()}, ctx), measured

    def update(self, server: Slot, delta: Arrays, uploads: Slot, ctx: ServerContext) -> ServerStep:
        sums, delta = super().update(server, delta, uploads, ctx)
        ids = [] if ctx.robust else list(ctx.weights)  # a robust sum has no single client's share
        return {**sums, "ids": np.array(ids, dtype=np.int64)} if uploads else sums, delta


class FedCurv(MethodStrategy):
    """FedAvg with the pull to the other clients' last models.

    Parameters
    ----------
    lam : float
        Strength λ of the pull.
    fisher_samples : int, optional
        See :class:`Curvature`.
    implicit : bool
        As for :class:`Elastic`: ours, not the paper's.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self,
        lam: float,
        fisher_samples: int | None = None,
        *,
        implicit: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__([Curvature(lam, fisher_samples, implicit)], **kwargs)


class FedCurvClient(MethodClient):
    """The client of :class:`FedCurv`."""

    terms = (Curvature,)
