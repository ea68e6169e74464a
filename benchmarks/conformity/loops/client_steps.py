"""Methods that change a client's step, and the server's with it.

Sources: Li et al. 2020, Alg. 2 (FedProx); Karimireddy et al. 2020, Alg. 1 (SCAFFOLD); Acar et al. 2021,
Alg. 1 (FedDyn); Wang et al. 2020 (FedNova); Ozfatura et al. 2021, Alg. 4 (FedADC); Fan et al. 2024, Alg. 1
(FedLESAM); Shoham et al. 2019, Eqs. 4-6 (FedCurv).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..model import Batch, Params, gradient, minus, plus, square
from .run import Run


class FedProx(Run):
    """``+ mu (v - w)``."""

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the gradient of ``f_k + mu/2 |v - w|^2``."""
        grad, buffers = gradient(v, batch)
        apart, mu = minus(v, {n: self.w[n] for n in self.trained}), self.task.mu
        if "no-penalty" in self.has:
            return grad, buffers
        if "norm" in self.has:  # the gradient of mu/2 sum of norms; 0 where a norm is 0
            apart = {n: a / (2 * float(np.sqrt((a**2).sum())) or 1.0) for n, a in apart.items()}
        return plus(grad, mu * (2 if "twice-mu" in self.has else 1), apart), buffers


class SCAFFOLD(Run):
    """Control variates: ``c - c_k`` in each step; option I or II for the new c_k."""

    weighting = "uniform"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.c = self._begin()
        self.own: dict[int, Params] = {}
        self.new: dict[int, Params] = {}

    def _begin(self) -> Params:
        """Return a control variate that nobody has used yet."""
        return minus(self.w, self.zero) if "from-weights" in self.has else dict(self.zero)

    def client(self, k: int, visited: list[Params]) -> Params:
        """Train client k, and keep its new control variate until the server takes it."""
        if k not in self.own:
            self.own[k] = self._begin()
        elif "new-at-once" in self.has:
            self.own[k] = self._variate(k, self.w, 0)
        v = super().client(k, visited)
        self.new[k] = self._variate(k, v, len(visited))
        return v

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the corrected gradient, Algorithm 1, line 10."""
        grad, buffers = self.slope(v, batch)
        change = minus(self.c, self.own[k])
        if "no-correction" in self.has:
            return grad, buffers
        if "outside-momentum" in self.has:
            for name in self.trained:
                v[name] = v[name] - self.lr * change[name]
            return grad, buffers
        return plus(grad, 1.0, change), buffers

    def _variate(self, k: int, v: Params, steps: int) -> Params:
        """Return c_k+, Algorithm 1, line 12."""
        sign = -1.0 if "wrong-sign" in self.has else 1.0
        if self.method == "SCAFFOLD-1":
            grad, _ = gradient(self.w, self.task.clients[k])
            return {name: sign * grad[name] for name in self.trained}
        taken, rho = float(max(steps, 1)), self.task.momentum
        if "one-epoch-steps" in self.has:
            taken = math.ceil(taken / self.task.epochs)
        if "first-clients-steps" in self.has:
            taken = self.task.epochs * len(self.task.clients[0][1]) / self.task.batch_size
        if "nova-steps" in self.has:
            taken = (taken - rho * (1 - rho**taken) / (1 - rho)) / (1 - rho)
        lr = self.task.lr if "undecayed-lr" in self.has else self.lr
        moved = minus(self.w, {name: v[name] for name in self.trained})
        return plus(minus(self.own[k], self.c), sign / (taken * lr), moved)

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the clients' models and control variates."""
        super().server(cohort, ends)
        rise = self.mean(cohort, {k: minus(self.new[k], self.own[k]) for k in cohort})
        share = 1.0 if "c-of-cohort" in self.has else len(cohort) / len(self.task.clients)
        self.c = plus(self.c, share, rise)
        self.own |= self.new


class FedDyn(Run):
    """``+ alpha (v - w + s_k)`` with ``s_k = -h_k/alpha``, the sum of the client's updates so far."""

    weighting = "uniform"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sums: dict[int, Params] = {}

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the gradient of ``f_k - <h_k, v> + alpha/2 |v - w|^2``."""
        grad, buffers = gradient(v, batch)
        alpha, apart = self.settings["alpha"], minus(v, self.w)
        if "alpha-by-share" in self.has:
            sizes = [len(y) for _, y in self.task.clients]
            alpha /= sizes[k] * len(sizes) / sum(sizes)
        pull = alpha
        if "root-of-penalty" in self.has:
            pull = alpha / 2 / (math.sqrt(square(apart)) or 1.0)
        grad = plus(grad, alpha, self.sums.get(k, self.zero))
        return plus(grad, pull, apart), buffers

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take ``mean v_k - h/alpha``."""
        for k in cohort:
            self.sums[k] = plus(self.sums.get(k, self.zero), 1.0, minus(ends[k], self.w))
        super().server(cohort, ends)
        for total in self.sums.values():
            self.w = plus(self.w, 1.0 / len(self.task.clients), total)


class FedNova(FedProx):
    """Proximal steps, of which the server knows how much each gradient counts."""

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take ``tau_eff`` times the mean of the updates over ``|a_k|``."""
        small = self.lr * self.task.mu
        steps = {k: len(self.indices(len(self.task.clients[k][1]))) for k in cohort}
        counts = {k: (1 - (1 - small) ** s) / small for k, s in steps.items()}
        p = self.weights(cohort)
        counted = steps if "steps-as-tau" in self.has else counts
        tau = sum(p[k] * counted[k] for k in cohort)
        for_one = {k: {n: a / counts[k] for n, a in minus(ends[k], self.w).items()} for k in cohort}
        self.w = plus(self.w, tau, self.mean(cohort, for_one))


class FedADC(Run):
    """Double momentum, Alg. 4: the server's in each step, beside the client's own."""

    weighting = "uniform"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.m = dict(self.zero)

    def client(self, k: int, visited: list[Params]) -> Params:
        """Train with ``m_bar = beta m/K`` and ``u = phi u + (1 - phi) g``, u = g first."""
        v, u, phi = dict(self.w), dict[str, Any](), self.settings["phi"]
        batches = list(self.batches(k))
        beta = 1.0 if "whole-momentum" in self.has else self.settings["beta"]
        for batch in batches:
            visited.append(dict(v))
            grad, _ = gradient(v, batch)
            if u and "over-one-plus-phi" in self.has:
                grad = {n: (phi * u[n] + grad[n]) / (1 + phi) for n in v}
            elif u:
                grad = {n: phi * u[n] + (1 - phi) * grad[n] for n in v}
            u = grad
            v = plus(plus(v, -self.lr, u), -self.lr * beta / len(batches), self.m)
        return v

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the mean, and its step as the momentum."""
        before = self.w
        super().server(cohort, ends)
        self.m = {n: a / self.lr for n, a in minus(before, self.w).items()}


class FedLESAM(Run):
    """Gradients at ``v + rho d/|d|``, ``d = w_old - w``, w_old what the client last received."""

    weighting = "uniform"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.received: dict[int, Params] = {}
        self.before: Params | None = None  # the model of the last round

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the gradient at the perturbed point."""
        old = self.before if "servers-step" in self.has else self.received.get(k)
        if old is None:
            return gradient(v, batch)
        d = minus(old, self.w)
        if "one-entry" in self.has:
            flat = np.concatenate([a.ravel() for a in d.values()])
            d = {name: np.full(a.shape, flat[i]) for i, (name, a) in enumerate(d.items())}
            norms = [abs(flat[i]) for i in range(len(d))]
        else:
            norms = [math.sqrt((a**2).sum()) for a in d.values()]
        length = sum(norms) if "sum-of-norms" in self.has else math.hypot(*norms)
        return gradient(plus(v, self.settings["rho"] / length if length else 0.0, d), batch)

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the mean; the clients keep what they received."""
        self.received |= dict.fromkeys(cohort, self.w)
        self.before = self.w
        super().server(cohort, ends)


class FedCurv(Run):
    """``+ 2 lam ((U - u_k) v - (V - u_k v_k))``, U and V the sums over the last round's replies."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kept: dict[int, tuple[Params, Params]] = {}

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the gradient with the pull towards the others' models."""
        grad, buffers = gradient(v, batch)
        for j, (u, end) in self.kept.items():
            if j != k:
                grad = {
                    n: g + 2 * self.settings["lam"] * u[n] * (v[n] - end[n])
                    for n, g in grad.items()
                }
        return grad, buffers

    def fisher(self, k: int, v: Params) -> Params:
        """Return the mean of the squared gradients of each example; or, as a behaviour, of each batch."""
        x, y = self.task.clients[k]
        size = self.task.batch_size if "batch-squares" in self.has else 1
        parts = [(x[i : i + size], y[i : i + size]) for i in range(0, len(y), size)]
        total = dict(self.zero)
        for part in parts:
            total = plus(total, 1 / len(parts), {n: g**2 for n, g in gradient(v, part)[0].items()})
        return total

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the mean; keep this round's u_k alone."""
        if "old-fisher" not in self.has:
            self.kept = {}
        self.kept |= {k: (self.fisher(k, ends[k]), ends[k]) for k in cohort}
        super().server(cohort, ends)
