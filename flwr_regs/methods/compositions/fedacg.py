"""FedACG: clients start where the server's momentum leads, and are pulled back to there.

| *Init*       ``m = 0``
| *Broadcast*  ``z = w_t + λ m``
| *Step*       ``v ← v − η (∇f_k(v) + μ (v − z))``, from ``v = z``
| *Upload*     ``v_k``
| *Update*     ``Δ̄ = mean(v_k − z)``, ``m ← λ m + Δ̄``, ``w ← mean v_k``

What is sent is z, so z is the global model here. It moves by ``Δ̄ + λ m``, with the new m: the step of
torch's ``SGD(lr=1, momentum=λ, nesterov=True)`` on the server. The pull is `Proximal` (fedprox.py).

The paper reports the accuracy of ``w = z − λ m``, the mean of the clients' models. If `evaluate_fn` returns
metrics, the history has those of w too, as ``averaged_metrics``; ``strategy.averaged_arrays`` is w.

Source: Kim, Kim, Han, "Communication-efficient federated learning with accelerated client gradient" (2024),
Alg. 1. Its server averages the clients alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_regs.abilities import Averages, Steps
from flwr_regs.methods.client_step.fedprox import Proximal
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.term import DECAY, Arrays, Ranges, ServerContext, ServerStep, Slot, Term

__all__ = ["FedACG", "FedACGClient", "LookaheadMomentum"]


@dataclass(frozen=True)
class LookaheadMomentum(Term, Steps, Averages):
    """FedACG's momentum on the server, which moves z by ``Δ̄ + λ m``.

    Parameters
    ----------
    lam : float
        Momentum λ in [0, 1).
    """

    name: ClassVar[str] = "fedacg"
    reads_lr: ClassVar[bool] = False
    ranges: ClassVar[Ranges] = {"lam": DECAY}
    lam: float = 0.85

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> ServerStep:
        m = {n: self.lam * server.get(n, 0.0) + d for n, d in delta.items()}
        return m, {n: d + self.lam * m[n] for n, d in delta.items()}

    def averaged(self, model: Arrays, step: Arrays, server: Slot) -> Arrays:
        return {n: z - self.lam * server.get(n, 0.0) for n, z in model.items()}  # w


class FedACG(MethodStrategy):
    """FedProx from the point where the server's momentum leads.

    Parameters
    ----------
    lam : float
        See :class:`LookaheadMomentum`. The paper uses 0.85.
    mu : float
        Strength μ ≥ 0 of the pull to z. The paper uses 0.01 and 0.001.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self, lam: float = 0.85, mu: float = 0.01, *, weighting: str = "uniform", **kwargs: Any
    ) -> None:
        terms = [Proximal(mu), LookaheadMomentum(lam)]
        super().__init__(terms, weighting=weighting, **kwargs)


class FedACGClient(MethodClient):
    """The client of :class:`FedACG`."""

    terms = (Proximal,)
