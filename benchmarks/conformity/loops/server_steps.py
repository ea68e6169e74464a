"""Methods that change the server's step alone.

Sources: McMahan et al. 2017, Alg. 1 (FedAvg); Jhunjhunwala et al. 2023, Alg. 1 (FedExP); Li et al. 2020,
Alg. 2 (q-FedAvg); Hsu et al. 2019 (FedAvgM); Reddi et al. 2021, Alg. 2 (FedAdagrad, FedAdam, FedYogi).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..model import BUFFERS, Params, loss, minus, plus, square
from .run import Run


class FedAvg(Run):
    """The mean of the clients' models."""

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the mean; one behaviour takes the first client's buffers."""
        super().server(cohort, ends)
        if "own-buffers" in self.has:
            self.w |= {name: ends[cohort[0]][name] for name in BUFFERS}


class FedExP(Run):
    """``eta = max(1, mean |D_k|^2 / (2 (|D|^2 + eps)))`` times the mean update."""

    weighting = "uniform"

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the extrapolated step."""
        deltas, p = {k: minus(ends[k], self.w) for k in cohort}, self.weights(cohort)
        mean, eps = self.mean(cohort, deltas), self.settings["eps"]
        if "eps-by-cohort" in self.has:
            eps *= len(cohort)
        if "eps-decays" in self.has:
            eps *= 0.998 ** (2 * (self.round + 1))
        spread = sum(p[k] * square(deltas[k]) for k in cohort)
        self.w = plus(self.w, max(1.0, spread / (2 * (square(mean) + eps))), mean)


class QFedAvg(Run):
    """``sum F_k^q Dw_k / sum (q F_k^(q-1) |Dw_k|^2 + L F_k^q)``, ``Dw_k = L (w - v_k)``, L = 1/lr."""

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the fair step; the mean's weights play no part."""
        above, below, q = dict(self.zero), 0.0, self.settings["q"]
        for k in cohort:
            x, y = self.task.clients[k]
            n = len(y) - (len(y) % self.task.batch_size if "drop-last" in self.has else 0)
            height = loss(self.w, (x[:n], y[:n]))
            step = {n: a / self.lr for n, a in minus(self.w, ends[k]).items()}
            above = plus(above, height**q, step)
            long = square(step) * (height ** (2 * q) if "twice-the-power" in self.has else 1.0)
            below += q * height ** (q - 1) * long + height**q / self.lr
        self.w = plus(self.w, -1 / below, above)


class FedAvgM(Run):
    """Heavy-ball SGD on the mean update."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.m = dict(self.zero)

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the momentum's step."""
        delta = minus(self.mean(cohort, ends), self.w)
        self.m = plus(delta, self.settings["momentum"], self.m)
        self.w = plus(self.w, self.settings["server_lr"], self.m)


class AdaptiveServer(FedAvgM):
    """FedAdagrad, FedAdam, FedYogi: on the mean update, without bias correction; v starts at tau^2."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        start = 0.0 if "second-from-zero" in self.has else self.settings["tau"] ** 2
        self.second = {n: a + start for n, a in self.zero.items()}

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the adaptive step."""
        s, delta = self.settings, minus(self.mean(cohort, ends), self.w)
        b1, b2, lr = s["beta_1"], s["beta_2"], s["server_lr"]
        if "bias-corrected" in self.has:  # with the exponent t + 1, t from 1
            lr *= np.sqrt(1 - b2 ** (self.round + 2)) / (1 - b1 ** (self.round + 2))
        self.m = {n: b1 * self.m[n] + (1 - b1) * d for n, d in delta.items()}
        for n, d in delta.items():
            v = self.second[n]
            self.second[n] = {
                "FedAdagrad": v + d**2,
                "FedAdam": b2 * v + (1 - b2) * d**2,
                "FedYogi": v - (1 - b2) * d**2 * np.sign(v - d**2),
            }[self.method]
        step = {n: self.m[n] / (np.sqrt(self.second[n]) + s["tau"]) for n in delta}
        self.w = plus(self.w, lr, step)
