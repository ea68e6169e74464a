"""FedGAMMA: SCAFFOLD's corrected steps, with FedSAM's gradient.

| *Init*       ``c = 0``, and ``c_k = 0`` for every client
| *Broadcast*  ``w_t`` and c, from round 2
| *Step*       ``v ← v − η (∇f_k(ṽ) − c_k + c)``,  ``ṽ = v + ρ ∇f_k(v) / ‖∇f_k(v)‖``
| *Upload*     ``v_k``. The client keeps ``c_k⁺ = c_k − c + (w_t − v_k)/(K_k η)``
| *Update*     ``w ← w + η_g mean(v_k − w_t)``, ``c ← c + (1/N) Σ_{k∈S} (c_k⁺ − c_k)``

`LocalPerturbation` (sam.py) makes the gradient, and `ControlVariates` (scaffold.py, option 2) the step with
it. So the perturbation is of the plain gradient, and c_k is the mean of the perturbed ones. ρ = 0 is
SCAFFOLD. As there, clients run plain SGD.

Source: Dai, Yang, Sun, Shen, Tian, Wang, Zhang, "FedGAMMA: Federated learning with global sharpness-aware
minimization" (2023). Its server averages the clients alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from typing import Any

from flwr_regs.methods.client_step.sam import LocalPerturbation
from flwr_regs.methods.client_step.scaffold import ControlVariates, scaled
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy

__all__ = ["FedGAMMA", "FedGAMMAClient"]


class FedGAMMA(MethodStrategy):
    """SCAFFOLD (option 2) with sharpness-aware gradients.

    Parameters
    ----------
    rho : float
        Distance ρ ≥ 0: see :class:`LocalPerturbation`.
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
        terms = [LocalPerturbation(rho), ControlVariates(), *scaled(server_lr)]
        super().__init__(terms, weighting=weighting, **kwargs)


class FedGAMMAClient(MethodClient):
    """The client of :class:`FedGAMMA`."""

    terms = (LocalPerturbation, ControlVariates)
