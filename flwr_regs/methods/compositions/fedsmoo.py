"""FedSMOO: the clients' perturbations agree, by a dual variable of their own in each step.

| *Init*       ``s = 0``, and ``μ_k = 0`` for every client; ``h̄`` and ``h_k`` as in FedSpeed
| *Broadcast*  ``w_t``, and from round 2 s
| *Step*       ``d = ∇f_k(v) − μ_k − s``, ``ŝ = ρ d/‖d‖``, ``μ_k ← μ_k + ŝ − s``;
|              ``v ← v − η (∇f_k(v + ŝ) + λ (v − w_t + h_k))``, from ``v = w_t``  (Alg. 1)
| *Upload*     ``v_k``, and ``μ_k``, which the client keeps beside ``h_k ← h_k + (v_k − w_t)``
| *Update*     ``h̄ ← h̄ + (1/N) Σ_{k∈S} (v_k − w_t)``, ``w ← mean v_k + h̄``; ``s ← ρ μ̄/‖μ̄‖``, μ̄ the mean
|              of the used μ_k

So it is :class:`flwr_regs.FedSpeed` with another perturbation: each client's ŝ is held to the common s.
``μ_k`` moves in each step, and goes on where it stood in the client's last round whose reply was used.
d = 0: no perturbation; μ̄ = 0: s = 0. ‖·‖ is over all trained parameters as one vector. Both gradients are
of the plain loss, on the same batch with the same dropout mask; so the perturbation stands on the left of
all that pulls. In s all clients count alike, whatever the `weighting` of their models.

Departure: the paper's ``μ̃`` has a further term, the mean of ``ŝ_{k,K}``; it is left out here, as in the
authors' code.

Source: Sun, Shen, Chen, Ding, Tao, "Dynamic regularized sharpness aware minimization in federated learning:
Approaching global consistency and smooth landscape" (2023), Alg. 1. Its server averages the clients alike,
so ``weighting`` is "uniform".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flwr_regs.abilities import Checks, Evolves
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.client_step.feddyn import DynamicRegulariser
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.perturbation import moved, of_length
from flwr_regs.methods.parts.uploads import Sums, check_like, kept
from flwr_regs.term import NOT_NEGATIVE, POSITIVE, Ranges, Term, plain_number

__all__ = ["CommonPerturbation", "FedSMOO", "FedSMOOClient"]


@dataclass(frozen=True)
class CommonPerturbation(Term, Evolves, Sums, Checks):
    """FedSMOO's gradient at ``v + ŝ``, and the dual variables that hold ŝ to the common s (Alg. 1).

    Parameters
    ----------
    rho : float
        Distance ρ ≥ 0, in the units of the parameters; 0 leaves the gradients as they are.
    """

    name: ClassVar[str] = "fedsmoo"
    keeps_delta: ClassVar[bool] = True
    keeps_update: ClassVar[bool] = True
    excludes: ClassVar[tuple[str, ...]] = ("fedsam", "fedlesam")
    ranges: ClassVar[Ranges] = {"rho": NOT_NEGATIVE}
    rho: float = 0.1

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        return server  # s

    def _shift(self, grads: Arrays, ctx: ClientContext) -> Arrays:
        """Return ŝ."""
        mu, s = ctx.client, ctx.broadcast
        d = {n: g - mu.get(n, 0.0) - s.get(n, 0.0) for n, g in grads.items()}
        return of_length(d, self.rho)

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return ctx.gradient_at(moved(params, self._shift(grads, ctx)))

    def evolve(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Slot:
        mu, s = ctx.client, ctx.broadcast
        return {n: mu.get(n, 0.0) + p - s.get(n, 0.0) for n, p in self._shift(grads, ctx).items()}

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, dict(ctx.client), dict(ctx.client)

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        check_like(params, upload)

    def update(self, server: Slot, delta: Arrays, uploads: Slot, ctx: ServerContext) -> ServerStep:
        norm = sum(np.vdot(mu, mu) for mu in uploads.values()) ** 0.5
        scale = self.rho / norm if norm else 0.0
        return {n: kept(scale * mu, ctx.params[n]) for n, mu in uploads.items()}, delta


class FedSMOO(MethodStrategy):
    """FedSpeed with perturbations on which the clients agree (Alg. 1).

    Parameters
    ----------
    lam : float
        λ > 0, the strength of pull and linear term: the authors' code has 0.1. It is alpha of
        :class:`flwr_regs.DynamicRegulariser`.
    rho : float
        See :class:`CommonPerturbation`.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights. The h_k and μ_k always count alike.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self, lam: float = 0.1, rho: float = 0.1, *, weighting: str = "uniform", **kwargs: Any
    ) -> None:
        lam = plain_number(lam)
        POSITIVE.check("FedSMOO", "lam", lam)
        terms: list[Term] = [CommonPerturbation(rho), DynamicRegulariser(lam)]
        super().__init__(terms, weighting=weighting, **kwargs)


class FedSMOOClient(MethodClient):
    """The client of :class:`FedSMOO`."""

    terms = (CommonPerturbation, DynamicRegulariser)
