"""Methods that take gradients at a perturbed point, and the relaxed start that goes with them.

Sources: Qu et al. 2022, Alg. 1 (FedSAM); Dai et al. 2023 (FedGAMMA); Sun et al. 2023 (FedSpeed); Sun et al.
2023 (FedSMOO); Sun, Shen, Tao 2023, Alg. 1 (FedInit).
"""

from __future__ import annotations

import math
from typing import Any

from ..model import Batch, Params, gradient, minus, plus, square
from .client_steps import SCAFFOLD, FedDyn
from .run import Run


def scaled(d: Params, rho: float) -> Params:
    """Return rho d/|d|, all arrays as one vector; 0 where d is 0."""
    length = math.sqrt(square(d))
    return {name: a * (rho / length if length else 0.0) for name, a in d.items()}


class FedSAM(Run):
    """Gradients at ``v + rho grad f/|grad f|``."""

    weighting = "uniform"

    def slope(self, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the gradient at the perturbed point."""
        further = scaled(gradient(v, batch)[0], self.settings["rho"])
        return gradient(plus(v, 1.0, further), batch)


class FedGAMMA(FedSAM, SCAFFOLD):
    """SCAFFOLD, option II, whose gradients are FedSAM's."""


class FedSpeed(FedDyn):
    """``(1 - alpha) grad f(v) + alpha grad f(v + s) + lam (v - w + h_k)``, h_k its updates so far."""

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the direction of a step."""
        plain, buffers = gradient(v, batch)
        alpha, lam = self.settings.get("alpha", 1.0), self.settings["lam"]
        grad, _ = gradient(plus(v, 1.0, self.further(k, plain)), batch)
        grad = {n: (1 - alpha) * plain[n] + alpha * grad[n] for n in grad}
        pull = plus(minus(v, self.w), 1.0, self.sums.get(k, self.zero))
        return plus(grad, lam, pull), buffers

    def further(self, k: int, plain: Params) -> Params:
        """Return the perturbation s."""
        return scaled(plain, self.settings["rho"])


class FedSMOO(FedSpeed):
    """``s = rho d/|d|``, ``d = grad f(v) - mu_k - c``, then ``mu_k += s - c``.

    c is rho long, in the direction of the cohort's mean mu_k.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.common = dict(self.zero)
        self.duals: dict[int, Params] = {}

    def further(self, k: int, plain: Params) -> Params:
        """Return the client's perturbation, and correct its dual variable."""
        dual = self.duals.get(k, self.zero)
        own = scaled(minus(minus(plain, dual), self.common), self.settings["rho"])
        self.duals[k] = plus(dual, 1.0, minus(own, self.common))
        return own

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take FedSpeed's step, and the common perturbation of the cohort's dual variables."""
        super().server(cohort, ends)
        self.common = scaled(self.mean(cohort, self.duals), self.settings["rho"])


class FedInit(Run):
    """Clients start at ``w + beta (w - v_k)``, v_k their last local model."""

    weighting = "uniform"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.last: dict[int, Params] = {}

    def start(self, k: int) -> Params:
        """Return the relaxed start."""
        last = self.last.get(k, self.first if "relaxed-from-first" in self.has else self.w)
        return plus(self.w, self.settings["beta"], minus(self.w, last))

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the mean of the models; or, as a behaviour, of what each moved from its start."""
        taken = ends
        if "from-start" in self.has:
            taken = {k: plus(self.w, 1.0, minus(ends[k], self.start(k))) for k in cohort}
        super().server(cohort, taken)
        self.last |= ends
