"""FedSpeed: FedDyn's linear term and pull, with a gradient that looks a distance ρ ahead.

| *Init*       ``h̄ = 0``, and ``h_k = 0`` for every client
| *Broadcast*  ``w_t``
| *Step*       ``v ← v − η ((1 − α) ∇f_k(v) + α ∇f_k(ṽ) + λ (v − w_t + h_k))``, from ``v = w_t``, with
|              ``ṽ = v + ρ ∇f_k(v)/‖∇f_k(v)‖``  (Alg. 1)
| *Upload*     ``v_k``. The client keeps ``h_k ← h_k + (v_k − w_t)``
| *Update*     ``h̄ ← h̄ + (1/N) Σ_{k∈S} (v_k − w_t)``, ``w ← mean v_k + h̄``

N is the population, S the replies that are used. The paper's prox-correction term ``ĝ_k`` is ``−λ h_k``
here, and its λ is 1/λ here. Both gradients are of the plain loss, on the same batch with the same dropout
mask; so the perturbation stands on the left of all that pulls. ∇f_k(v) = 0: no perturbation.

All but the gradient is :class:`flwr_regs.FedDyn` with strength λ, whose ``h_k`` and h are ``−λ h_k`` and
``−λ h̄``: where ρ or α is 0 it is FedDyn. So everything that file says of lost state, half precision and
robust aggregators holds.

Departure: the paper's server takes ``mean_S (v_k + h_k)``. That is what is here if all clients take part.
Otherwise the authors' code has the mean of all h_k, too.

Source: Sun, Shen, Huang, Ding, Tao, "FedSpeed: Larger local interval, less communication round, and higher
generalization accuracy" (2023), Alg. 1. Its server averages the clients alike, so ``weighting`` is
"uniform".
"""

from __future__ import annotations

from typing import Any

from flwr_regs.methods.client_step.feddyn import DynamicRegulariser
from flwr_regs.methods.client_step.sam import LocalPerturbation
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.term import POSITIVE, SHARE, Term, plain_number

__all__ = ["FedSpeed", "FedSpeedClient"]


class FedSpeed(MethodStrategy):
    """FedDyn's correction with perturbed gradients (Alg. 1).

    Parameters
    ----------
    lam : float
        λ > 0, the strength of pull and linear term: the authors' code has 0.1. It is alpha of
        :class:`flwr_regs.DynamicRegulariser`.
    rho : float
        Distance ρ ≥ 0: see :class:`LocalPerturbation`.
    alpha : float
        Share α of the perturbed gradient, from 0 to 1.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights. The h_k always count alike.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self,
        lam: float = 0.1,
        rho: float = 0.1,
        alpha: float = 1.0,
        *,
        weighting: str = "uniform",
        **kwargs: Any,
    ) -> None:
        lam, alpha = plain_number(lam), plain_number(alpha)
        POSITIVE.check("FedSpeed", "lam", lam)
        SHARE.check("FedSpeed", "alpha", alpha)
        terms: list[Term] = [LocalPerturbation(rho, alpha), DynamicRegulariser(lam)]
        super().__init__(terms, weighting=weighting, **kwargs)


class FedSpeedClient(MethodClient):
    """The client of :class:`FedSpeed`."""

    terms = (LocalPerturbation, DynamicRegulariser)
