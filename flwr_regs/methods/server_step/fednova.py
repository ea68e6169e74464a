"""FedNova: normalised averaging, so that clients with more local steps do not count more.

| *Init*       nothing
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← v − η ∇f_k(v)``; with momentum ρ: torch's ``SGD(momentum=ρ)``, which starts at 0 in
|              each round; proximal: ``v ← v − η (∇f_k(v) + μ (v − w_t))``
| *Upload*     ``v_k``, ``n_k``, and ``s_k``, the local steps taken
| *Update*     ``w ← w + τ_eff Σ p_k (v_k − w_t) / a_k``, with ``τ_eff = Σ p_k a_k``

``a_k`` is the paper's ``‖a_k‖₁``, the sum of the weights that the client's gradients have in its update:

| plain        ``a = s``
| momentum     ``a = (s − ρ (1 − ρ^s)/(1 − ρ)) / (1 − ρ)``
| proximal     ``a = (1 − (1 − ημ)^s) / (ημ)``

So ``w`` moves by ``ω_k (v_k − w_t)`` with ``ω_k = p_k τ_eff / a_k``, which is ``p_k`` if all clients take
equally many steps. Buffers keep ``p_k``. A server optimiser beside it gets this weighted sum. ``s_k`` is
what the client reports, at most what the round asked it for; an ``a_k`` counts as at most `max_scale`
times the cohort's median, and at least as 1/`max_scale` of it.

Under a robust aggregator ``τ_eff`` is the median of the a_k, which no single client's word moves far. The
paper leaves τ_eff to the server: it sets the length of the step alone.

Source: Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in heterogeneous
federated optimization" (2020), Sec. 4. Momentum and the pull exclude each other here: the paper has no
``a_k`` for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from flwr_regs.abilities import Restricts, Steers, Weighs
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, Slot, bounded
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.sgd import SCHEDULE, unlike_sgd, with_settings
from flwr_regs.term import DECAY, NOT_NEGATIVE, Ranges, Term

__all__ = ["FedNova", "FedNovaClient", "NormalizedAveraging"]


@dataclass(frozen=True)
class NormalizedAveraging(Term, Weighs, Steers, Restricts):
    """FedNova's weights ``p_k τ_eff / a_k``, and the local momentum or pull that ``a_k`` accounts for.

    Parameters
    ----------
    momentum : float
        ρ of the clients' SGD, in [0, 1).
    mu : float
        Strength μ ≥ 0 of the pull to ``w_t``, with ``η μ < 1``; not beside momentum.
    """

    name: ClassVar[str] = "fednova"
    elementwise: ClassVar[bool] = True
    bounds_steps: ClassVar[bool] = True
    counts_on_rate: ClassVar[str] = SCHEDULE.format("FedNova")
    excludes: ClassVar[Mapping[str, str]] = {
        "proximal": "FedNova's weights do not account for a pull beside it: give FedNova mu=...",
        "fedadc": "FedNova's weights would multiply FedADC's momentum, which is in each client's update "
        "whatever its steps: leave one of the two out",
    }
    ranges: ClassVar[Ranges] = {"momentum": DECAY, "mu": NOT_NEGATIVE}
    momentum: float = 0.0
    mu: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum and self.mu:
            given = f"momentum={self.momentum:g} and mu={self.mu:g}"
            raise ValueError(f"FedNova has either momentum or mu, but got {given}: leave one out")

    def restrict(self, config: Mapping[str, Any]) -> None:
        lr = config.get("lr", 0.0)
        if self.mu and not lr * self.mu < 1:
            given = f"lr={lr:g} and mu={self.mu:g} make {lr * self.mu:g}"
            raise ValueError(f"FedNova's pull needs lr · mu < 1, but {given}: use a smaller mu")

    def client_optimizer(self, optimizer: Callable[..., Any]) -> Callable[..., Any]:
        if what := unlike_sgd(optimizer, ("momentum", "dampening", "maximize", "lr")):
            raise ValueError(
                f"FedNova's weights are for clients with SGD, but {what} weighs their gradients in "
                "another way: leave it out; for local momentum give the strategy momentum=..."
            )
        return with_settings(optimizer, momentum=self.momentum) if self.momentum else optimizer

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        if not self.mu:
            return grads
        return {n: (params[n] - ctx.start[n]).mul_(self.mu).add_(g) for n, g in grads.items()}

    def normaliser(self, steps: int, lr: float) -> float:
        """Return ``a_k``, what the gradients of `steps` local steps weigh together in the update."""
        if self.momentum:
            rho = self.momentum
            return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        if self.mu:
            pull = lr * self.mu
            return -math.expm1(steps * math.log1p(-pull)) / pull
        return float(steps)

    def weigh(
        self, weights: Mapping[int, float], uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> dict[int, float]:
        a = {k: self.normaliser(ctx.replies[k].num_steps, ctx.lr) for k in weights}
        a = bounded(a, ctx.max_scale)
        mean = sum(p * a[k] for k, p in weights.items())
        effective = median(a.values()) if ctx.robust else mean  # τ_eff
        return {k: p * effective / a[k] for k, p in weights.items()}


class FedNova(MethodStrategy):
    """FedAvg with normalised averaging of clients that take unequally many local steps.

    Parameters
    ----------
    momentum, mu : float
        See :class:`NormalizedAveraging`.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`. ``incomplete="scale"``, which
        weighs the updates too, is refused.
    """

    def __init__(self, momentum: float = 0.0, mu: float = 0.0, **kwargs: Any) -> None:
        super().__init__([NormalizedAveraging(momentum, mu)], **kwargs)


class FedNovaClient(MethodClient):
    """The client of :class:`FedNova`."""

    terms = (NormalizedAveraging,)
