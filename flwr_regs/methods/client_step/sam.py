"""FedSAM and FedLESAM: each step takes its gradient a distance ρ away, where the loss is higher.

| *Init*       nothing
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← v − η ∇f_k(v + ρ d / ‖d‖)``
|              FedSAM: ``d = ∇f_k(v)``, on the same batch
|              FedLESAM: ``d = w_old − w_t``, w_old the global model that this client last received
| *Upload*     ``v_k``. A client of FedLESAM keeps ``w_t``, whether or not its reply is used
| *Update*     ``w ← w + mean(v_k − w_t)``

‖·‖ is over all trained parameters as one vector. Where d = 0 there is no perturbation; nor is there one in
the first round of a client of FedLESAM, or after it lost its state: these are FedAvg's.

FedSAM's second gradient is that of the whole local loss, with the losses of all terms and the corrections
of those on the left. It has the batch and the dropout mask of the first, and leaves BatchNorm's statistics
as they are. Corrections on the right are added unperturbed, so this term comes last among those that pull.
Parameters that stay private (FedBN) are not perturbed, and do not count in ‖d‖.

FedLESAM takes one gradient a step, as d is known before: forward and backward pass are at the perturbed
point, and so are the training loss, BatchNorm's statistics and the losses of other terms. Corrections of
other terms are at v. A round without a step leaves w_old as it was.

Sources: Qu, Li, Duan, Liu, Tang, Lu, "Generalized federated learning via sharpness aware minimization"
(2022), Alg. 1; Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang, "Locally estimated global perturbations are
better than local perturbations for federated sharpness-aware minimization" (2024). Both servers average
the clients alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_regs.abilities import Perturbs
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.perturbation import moved, of_length
from flwr_regs.term import NOT_NEGATIVE, SHARE, Arrays, ClientContext, Ranges, Slot, Term

__all__ = [
    "FedLESAM",
    "FedLESAMClient",
    "FedSAM",
    "FedSAMClient",
    "GlobalPerturbation",
    "LocalPerturbation",
]


@dataclass(frozen=True)
class LocalPerturbation(Term):
    """FedSAM's gradient, at ``v + ρ ∇f_k(v) / ‖∇f_k(v)‖``; FedSpeed mixes it with that at v.

    Parameters
    ----------
    rho : float
        Distance ρ ≥ 0, in the units of the parameters; 0 is FedAvg.
    share : float
        FedSpeed's α, the share of the perturbed gradient, from 0 to 1; 1 is FedSAM.
    """

    name: ClassVar[str] = "fedsam"
    excludes: ClassVar[tuple[str, ...]] = ("fedlesam",)
    ranges: ClassVar[Ranges] = {"rho": NOT_NEGATIVE, "share": SHARE}
    rho: float
    share: float = 1.0

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        if not self.rho * self.share:
            return grads
        ahead = ctx.gradient_at(moved(params, of_length(grads, self.rho)))
        if self.share == 1:
            return ahead
        return {n: (1 - self.share) * g + self.share * ahead[n] for n, g in grads.items()}


@dataclass(frozen=True)
class GlobalPerturbation(Term, Perturbs):
    """FedLESAM's gradient, at ``v + ρ (w_old − w_t) / ‖w_old − w_t‖``.

    Parameters
    ----------
    rho : float
        Distance ρ ≥ 0, in the units of the parameters; 0 is FedAvg.
    """

    name: ClassVar[str] = "fedlesam"
    keeps: ClassVar[str] = "always"
    excludes: ClassVar[tuple[str, ...]] = ("fedsam",)
    ranges: ClassVar[Ranges] = {"rho": NOT_NEGATIVE}
    rho: float

    def point(self, params: Arrays, ctx: ClientContext) -> Arrays:
        if not self.rho or not ctx.client:
            return params
        direction = {n: ctx.client[n] - w for n, w in ctx.start.items()}
        return moved(params, of_length(direction, self.rho))

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {}, {n: w.clone() for n, w in ctx.start.items()}


class FedSAM(MethodStrategy):
    """FedAvg with sharpness-aware steps on the clients.

    Parameters
    ----------
    rho : float
        See :class:`LocalPerturbation`.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, rho: float, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([LocalPerturbation(rho)], weighting=weighting, **kwargs)


class FedSAMClient(MethodClient):
    """The client of :class:`FedSAM`."""

    terms = (LocalPerturbation,)


class FedLESAM(MethodStrategy):
    """FedAvg with steps that are perturbed along the last change of the global model.

    Parameters
    ----------
    rho : float
        See :class:`GlobalPerturbation`.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, rho: float, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([GlobalPerturbation(rho)], weighting=weighting, **kwargs)


class FedLESAMClient(MethodClient):
    """The client of :class:`FedLESAM`."""

    terms = (GlobalPerturbation,)
