"""FedLESAM-S and FedLESAM-D: SCAFFOLD's and FedDyn's steps, with FedLESAM's gradient.

| *Init*       S: ``c = 0``, ``c_k = 0``; D: ``h = 0``, ``h_k = 0``
| *Broadcast*  ``w_t``; S: and c, from round 2
| *Step*       with ``ṽ = v + ρ d / ‖d‖``, ``d = w_old − w_t``, w_old the global model that this client last
|              received:
|              S: ``v ← v − η (∇f_k(ṽ) − c_k + c)``
|              D: ``v ← v − η (∇f_k(ṽ) − h_k + α (v − w_t))``
| *Upload*     ``v_k``. The client keeps ``w_t``, whether or not its reply is used; and, if it is used,
|              S: ``c_k⁺ = c_k − c + (w_t − v_k)/(K_k η)``;  D: ``h_k ← h_k − α (v_k − w_t)``
| *Update*     S: SCAFFOLD's of option 2;  D: FedDyn's

`GlobalPerturbation` (sam.py) sets the point, `ControlVariates` (scaffold.py) or `DynamicRegulariser`
(feddyn.py) the step. FedDyn's pull is taken at v. The first round of a client is SCAFFOLD's or FedDyn's;
ρ = 0 is so always.

Source: Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang, "Locally estimated global perturbations are better than
local perturbations for federated sharpness-aware minimization" (2024), Alg. 1. Its server averages the
clients alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from typing import Any

from flwr_regs.methods.client_step.feddyn import DynamicRegulariser
from flwr_regs.methods.client_step.sam import GlobalPerturbation
from flwr_regs.methods.client_step.scaffold import ControlVariates, scaled
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy

__all__ = ["FedLESAMD", "FedLESAMDClient", "FedLESAMS", "FedLESAMSClient"]


class FedLESAMS(MethodStrategy):
    """SCAFFOLD (option 2) at FedLESAM's points.

    Parameters
    ----------
    rho : float
        Distance ρ ≥ 0: see :class:`GlobalPerturbation`.
    server_lr : float
        η_g > 0, the server's step size.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights. The control variates always count alike.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self, rho: float, server_lr: float = 1.0, *, weighting: str = "uniform", **kwargs: Any
    ) -> None:
        terms = [GlobalPerturbation(rho), ControlVariates(), *scaled(server_lr)]
        super().__init__(terms, weighting=weighting, **kwargs)


class FedLESAMSClient(MethodClient):
    """The client of :class:`FedLESAMS`."""

    terms = (GlobalPerturbation, ControlVariates)


class FedLESAMD(MethodStrategy):
    """FedDyn at FedLESAM's points.

    Parameters
    ----------
    rho : float
        Distance ρ ≥ 0: see :class:`GlobalPerturbation`.
    alpha : float
        Strength α > 0: see :class:`DynamicRegulariser`.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights. The h_k always count alike.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self, rho: float, alpha: float, *, weighting: str = "uniform", **kwargs: Any
    ) -> None:
        terms = [GlobalPerturbation(rho), DynamicRegulariser(alpha)]
        super().__init__(terms, weighting=weighting, **kwargs)


class FedLESAMDClient(MethodClient):
    """The client of :class:`FedLESAMD`."""

    terms = (GlobalPerturbation, DynamicRegulariser)
