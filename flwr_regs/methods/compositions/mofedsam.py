"""MoFedSAM: FedCM's steps along the last global step, with FedSAM's gradient. Stateless.

| *Init*       nothing
| *Broadcast*  ``w_t`` and, from round 2, ``g = (w_{t−1} − w_t) / η``  (η of the round that made it)
| *Step*       ``v ← v − η (α ∇f_k(ṽ) + (1 − α) g / K_k)``,  ``ṽ = v + ρ ∇f_k(v) / ‖∇f_k(v)‖``
| *Upload*     ``v_k``
| *Update*     ``w ← w + mean(v_k − w_t)``

`LocalPerturbation` (sam.py) makes the gradient, and `ClientMomentum` (fedcm.py) the step with it: the
perturbation is of the client's own gradient, before the last global step is mixed in. ρ = 0 is FedCM, α = 1
is FedSAM. Round 1 is FedSAM's, as FedCM's is FedAvg's.

Source: Qu, Li, Duan, Liu, Tang, Lu, "Generalized federated learning via sharpness aware minimization"
(2022). Its server averages the clients alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from typing import Any

from flwr_regs.methods.client_step.fedcm import ClientMomentum
from flwr_regs.methods.client_step.sam import LocalPerturbation
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy

__all__ = ["MoFedSAM", "MoFedSAMClient"]


class MoFedSAM(MethodStrategy):
    """FedCM with sharpness-aware gradients.

    Parameters
    ----------
    rho : float
        Distance ρ ≥ 0: see :class:`LocalPerturbation`.
    alpha : float
        Share α of the client's own gradient: see :class:`ClientMomentum`.
    downlink : {"model", "delta"}
        As for :class:`flwr_regs.FedFOR`.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self,
        rho: float = 0.1,
        alpha: float = 0.1,
        downlink: str = "model",
        *,
        weighting: str = "uniform",
        **kwargs: Any,
    ) -> None:
        terms = [LocalPerturbation(rho), ClientMomentum(alpha)]
        super().__init__(terms, downlink=downlink, weighting=weighting, **kwargs)


class MoFedSAMClient(MethodClient):
    """The client of :class:`MoFedSAM`."""

    terms = (LocalPerturbation, ClientMomentum)
