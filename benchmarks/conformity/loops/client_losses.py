"""Methods that change a client's loss.

Sources: Wang, Tong et al. 2023, Alg. 1-2 (rFedAvg, rFedAvg+); Li, He, Song 2021, Alg. 1 (MOON); Yao et al.
2021 (FedGKD); Zhang et al. 2022 (FedLC); Li, Zhan 2021 (FedRS).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..model import Array, Batch, Params, backward, gradient, outputs, plus, softmax
from .run import Run


class RFedAvg(Run):
    """``+ lam mean_{j != k} |phi_bar - delta_j|^2``, delta_j by client j's own last model."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.table: dict[int, Array] = {}
        self.cohort: tuple[int, ...] = ()

    def delta(self, k: int, w: Params) -> Array:
        """Return the mean of phi over the client's examples; or, as a behaviour, over a batch."""
        x, _ = self.task.clients[k]
        mean: Array = outputs(w, x[: self.task.batch_size] if "delta-of-batch" in self.has else x)[
            0
        ].mean(0)
        return mean

    def next_round(self, cohort: tuple[int, ...]) -> tuple[Params, dict[int, list[Params]]]:
        """Train a round; one behaviour has a table before it."""
        self.cohort = cohort
        if "term-at-once" in self.has:
            self.table = {k: self.delta(k, self.first) for k in cohort} | self.table
        return super().next_round(cohort)

    def targets(self, k: int) -> list[Array]:
        """Return what phi_bar is compared with."""
        compared = self.cohort if "of-cohort" in self.has else tuple(self.table)
        others = [j for j in compared if j in self.table and (j != k or "own-too" in self.has)]
        return [self.table[j] for j in others]

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the gradient with the term."""
        grad, buffers = gradient(v, batch)
        phi, targets = outputs(v, batch[0])[0], self.targets(k)
        for delta in targets:
            g = np.broadcast_to(2 * (phi.mean(axis=0) - delta) / len(phi), phi.shape)
            pull = backward(v, batch[0], g, features=True)
            grad = plus(grad, self.settings["lam"] / len(targets), pull)
        return grad, buffers

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the mean, and the clients' rows."""
        self.table |= {k: self.delta(k, ends[k]) for k in cohort}
        super().server(cohort, ends)


class RFedAvgPlus(RFedAvg):
    """``+ lam |phi_bar - mean_{j != k} delta_j|^2``, all delta_j by the same global model."""

    def next_round(self, cohort: tuple[int, ...]) -> tuple[Params, dict[int, list[Params]]]:
        """Train a round, with a table that is of its model."""
        self.table = {k: self.delta(k, self.w) for k in cohort}
        return super().next_round(cohort)

    def targets(self, k: int) -> list[Array]:
        """Return the one mean."""
        return [np.mean(super().targets(k), axis=0)]


class MOON(Run):
    """``+ mu log(1 + e^((s_p - s_g)/tau))``, cosines with the client's last and the global model's phi."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.last: dict[int, Params] = {}

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the gradient with the contrast, if the client has a last model."""
        grad, buffers = gradient(v, batch)
        last = self.last.get(k, self.first if "untrained-last" in self.has else None)
        if last is None:
            return grad, buffers
        x, tau = batch[0], self.settings["tau"]
        z, z_g, z_p = (outputs(w, x)[0] for w in (v, self.w, last))

        def cosine(other: Array) -> tuple[Array, Array]:
            lengths = np.sqrt((z**2).sum(1) * (other**2).sum(1))[:, None]
            s = (z * other).sum(1)[:, None] / lengths
            return s, other / lengths - s * z / (z**2).sum(1)[:, None]

        (s_g, d_g), (s_p, d_p) = cosine(z_g), cosine(z_p)
        share = 1 / (1 + np.exp((s_g - s_p) / tau)) / tau / len(x)
        pull = backward(v, x, share * (d_p - d_g), features=True)
        return plus(grad, self.settings["mu"], pull), buffers

    def client(self, k: int, visited: list[Params]) -> Params:
        """Train client k, and keep its model."""
        self.last[k] = super().client(k, visited)
        return self.last[k]


class FedGKD(Run):
    """``+ gamma/2 T^2 KL(teacher || student)``, the teacher the mean of the last M global models."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.models = [] if "without-first-model" in self.has else [self.w]

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the gradient with the distillation, if there is a teacher."""
        grad, buffers = gradient(v, batch)
        last = self.models[-int(self.settings["models"]) :]
        if not last:
            return grad, buffers
        teacher = {n: np.mean([w[n] for w in last], axis=0) for n in self.w}
        heat = self.settings["temperature"]
        p, target = (softmax(outputs(w, batch[0])[1] / heat) for w in (v, teacher))
        pull = backward(v, batch[0], heat * (p - target) / len(p))
        return plus(grad, self.settings["gamma"] / 2, pull), buffers

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the mean, and keep it."""
        super().server(cohort, ends)
        self.models.append(self.w)


class _Counted(Run):
    """A cross-entropy of logits that the client's label counts change."""

    def counts(self, k: int) -> Array:
        """Return how many of the client's examples have each label."""
        return np.bincount(self.task.clients[k][1], minlength=len(self.w["2.bias"])).astype(float)


class FedLC(_Counted):
    """The cross-entropy of ``z_c - tau n_c^(-1/4)``; a class that the client lacks has left."""

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the gradient."""
        x, y = batch
        with np.errstate(divide="ignore"):
            z = outputs(v, x)[1] - self.settings["tau"] * self.counts(k) ** -0.25
        true = np.eye(z.shape[1])[y]
        if "others-only" in self.has:  # -log(e^z_y / sum_{j != y} e^z_j)
            z = np.where(true, -np.inf, z)
        return backward(v, x, (softmax(z) - true) / len(y)), {}


class FedRS(_Counted):
    """The cross-entropy of ``alpha z_c`` for the classes that the client lacks."""

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the gradient."""
        (x, y), n, alpha = batch, self.counts(k), self.settings["alpha"]
        scale = np.where(n > 0, 1.0, alpha)
        if "graded" in self.has:
            scale = alpha + (1 - alpha) * n / n.max()
        p = softmax(outputs(v, x)[1] * scale)
        return backward(v, x, scale * (p - np.eye(len(n))[y]) / len(y)), {}

    def indices(self, n: int) -> list[Any]:
        """Return the examples of each step; one behaviour goes on to five steps."""
        steps = super().indices(n)
        least = 5 if "five-steps" in self.has else 0
        return [steps[i % len(steps)] for i in range(max(least, len(steps)))]
