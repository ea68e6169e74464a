"""FedCM: a client steps along a mean of its own gradient and the last global step. Stateless.

| *Init*       nothing
| *Broadcast*  ``w_t`` and, from round 2, ``g = (w_{t−1} − w_t) / η``  (η of the round that made it)
| *Step*       ``v ← v − η (α ∇f_k(v) + (1 − α) Δ_t)``,  ``Δ_t = g / K_k``
| *Upload*     ``v_k``
| *Update*     ``w ← w + mean(v_k − w_t)``

``Δ_t`` is the last global step as a gradient of one local step. So over a round each client repeats
``1 − α`` times the last global step, and adds α times what its own gradients make. α = 1 is FedAvg. ``K_k``
are the client's own planned steps, or its step budget if that is smaller; under ``incomplete="scale"`` they
are the planned ones.

Departure: round 1 is FedAvg's. The paper's ``Δ_0 = 0`` would shrink its gradients by α.

The paper's clients run SGD without momentum. Momentum m multiplies the repeated step by 1/(1−m). If
``(1 − α) / (1 − m)`` is above 1, each step feeds a larger one, so this gives a warning. So does an
optimiser such as Adam, which rescales ``Δ_t``. What stands on the term's left is multiplied by α, what
stands on its right is not.

Source: Xu, Wang, Wang, Yao, "FedCM: Federated learning with client-level momentum" (2021), Alg. 2.
Its server averages the clients alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_regs.methods.parts.last_step import LastStep, steps_to_spread
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.once import log_once
from flwr_regs.term import FRACTION, Arrays, ClientContext, Ranges

__all__ = ["ClientMomentum", "FedCM", "FedCMClient"]


@dataclass(frozen=True)
class ClientMomentum(LastStep):
    """``α ∇f_k(v) + (1 − α) Δ_t`` in place of a client's gradient.

    Parameters
    ----------
    alpha : float
        Share α of the client's own gradient, above 0, up to 1; 1 is FedAvg.
    """

    name: ClassVar[str] = "fedcm"
    elementwise: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"alpha": FRACTION}
    alpha: float

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        if not ctx.broadcast:  # round 1
            return grads
        self._warn(ctx)
        rest = (1 - self.alpha) / steps_to_spread(ctx)
        last = ctx.broadcast
        return {n: self.alpha * g + rest * last[n] if n in last else g for n, g in grads.items()}

    def _warn(self, ctx: ClientContext) -> None:
        """Log once that the client's optimiser makes the repeated step larger than the step itself."""
        m = ctx.momentum
        if m is None:
            why = (
                "needs SGD without momentum on the clients, but their optimiser has no such setting, or "
                "was not made by loop.optimizer(...)"
            )
            log_once(f"FedCM {why}", self.name, ctx)
        elif 1 - self.alpha > 1 - m:
            why = (
                f"with alpha={self.alpha:g} and a client momentum of {m:g} repeats "
                f"{(1 - self.alpha) / (1 - m):.3g} times the last global step in each round, and above 1 "
                "training can diverge: leave out the momentum, or a learning rate of the optimiser's own"
            )
            log_once(f"FedCM {why}", self.name, ctx)


class FedCM(MethodStrategy):
    """FedAvg with the last global step as momentum of each client's steps.

    Parameters
    ----------
    alpha : float
        See :class:`ClientMomentum`.
    downlink : {"model", "delta"}
        As for :class:`flwr_regs.FedFOR`; clients compute ``Δ_t`` from the last step.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self, alpha: float, downlink: str = "model", *, weighting: str = "uniform", **kwargs: Any
    ) -> None:
        super().__init__([ClientMomentum(alpha)], downlink=downlink, weighting=weighting, **kwargs)


class FedCMClient(MethodClient):
    """The client of :class:`FedCM`."""

    terms = (ClientMomentum,)
