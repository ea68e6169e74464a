"""FedFOR: a first-order term against local updates that undo the last global step. Stateless.

| *Init*       nothing
| *Broadcast*  ``w_t`` and, from round 2, ``g = (w_{t−1} − w_t) / η``  (η of the round that made it)
| *Step*       ``v ← ClientOpt(v, ∇f_k(v) + α g ⊙ h)``,  ``h_j = 1`` where ``g_j (v_j − w_{t,j}) > 0``
| *Upload*     ``v_k``, ``n_k``
| *Update*     as FedAvg

The local objective is ``f_k(v) + α Σ_j h_j g_j (v_j − w_{t,j})`` (Eq. 7). The term is linear. It is
zero in each coordinate where the client moves in the direction of the last global step: a reward
there "leads to exploding negative gradient" (Sec. 3.2). With SGD of learning rate η, each local step
moves an opposing coordinate by ``α (w_t − w_{t−1})``. Round 1 has no last step: it is FedAvg.

The paper's clients run plain SGD, "no SGD momentum and weight decay" (App. D). Our copy of the paper
does not give α (its App. C shows a sweep without figures). The term acts in each of a client's K_k steps,
and momentum m makes each act 1/(1−m) times. So what counts is ``α K_k / (1 − m)``: our default keeps it at
2, ``α = 2 (1 − m) / K_k``. In our study (docs/fedfor-alpha.md) it gained there, and training could collapse
at 4 with 2 steps, at 8 with 5. For Adam the default is far too strong: there ``α K_k`` = 0.01 gained.

Source: Tian, Smith, Kira, "FedFOR: Stateless heterogeneous federated learning with first-order
regularization" (2022), Eqs. 4-7, Alg. 1, Tab. 1 (the two downlinks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_regs.methods.parts.last_step import LastStep
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.once import log_once
from flwr_regs.term import NOT_NEGATIVE, Arrays, ClientContext, Ranges

__all__ = ["FedFOR", "FedFORClient", "FirstOrder"]


@dataclass(frozen=True)
class FirstOrder(LastStep):
    """The gradient of ``α Σ_j h_j g_j (v_j − w_{t,j})`` (Eq. 7).

    Parameters
    ----------
    alpha : float, optional
        Strength α ≥ 0 of one step, dimensionless; 0 is FedAvg. None: ``2 (1 − m) / K_k``. K_k are the
        client's planned steps, or its step budget if that is smaller; a time budget does not change it.
        m is its optimiser's momentum. It counts as 0 for an optimiser without one, such as Adam (for which
        this is far too strong), and for one that your own loop does not make by ``loop.optimizer(...)``.
    """

    name: ClassVar[str] = "first-order"
    elementwise: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"alpha": NOT_NEGATIVE}
    alpha: float | None = None

    def _strength(self, ctx: ClientContext) -> Any:
        """Return α of one step."""
        alpha, steps, m = self.alpha, ctx.budget_steps, ctx.momentum or 0.0
        if alpha is None and ctx.momentum is None:
            text = (
                "FedFOR's default alpha is for SGD, and the client's optimiser has no setting 'momentum' "
                "(or was not made by loop.optimizer). If it is like SGD, nothing is to be done. With Adam "
                "and its like the default is far too strong: start with alpha = 0.01 / (local steps)"
            )
            log_once(text, self.name, ctx)
        if alpha and isinstance(steps, int) and alpha * steps > 6 * (1 - m):  # no int: a stack
            text = (
                f"FedFOR's alpha={alpha:g} is strong for {steps} local steps and momentum {m:g}: above "
                f"{6 * (1 - m) / steps:.3g} training can collapse; alpha=None is a third of that"
            )
            log_once(text, self.name, ctx)
        return 2 * (1 - m) / steps if alpha is None else alpha

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        if not ctx.broadcast:
            return grads
        alpha, out = self._strength(ctx), {}
        for n, grad in grads.items():
            if n in ctx.broadcast:
                g = ctx.broadcast[n]  # (w_{t−1} − w_t)/η, below Eq. 5
                # Eq. 7's step function, 0 or 1: a comparison takes several times as long under vmap
                h = (params[n] - ctx.start[n]).mul_(g).sign_().relu_()
                grad = h.mul_(g * alpha).add_(grad)
            out[n] = grad
        return out


class FedFOR(MethodStrategy):
    """FedAvg with the first-order term on the clients.

    Parameters
    ----------
    alpha : float, optional
        Strength α of one step; 0 is FedAvg. None: ``2 (1 − m) / K_k``, see :class:`FirstOrder`.
    downlink : {"model", "delta"}
        What the server sends. ``"model"``: ``w_t`` and ``g`` to every client (2 d; cross-device, where
        a client may take part only once). ``"delta"``: only ``w_t − w_{t−1}`` (d) to a client that took
        part in the last round and kept its model, the full pair to any other (cross-silo).
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, alpha: float | None = None, downlink: str = "model", **kwargs: Any) -> None:
        super().__init__([FirstOrder(alpha)], downlink=downlink, **kwargs)


class FedFORClient(MethodClient):
    """The client of :class:`FedFOR`."""

    terms = (FirstOrder,)
