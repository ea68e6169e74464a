"""Methods with a model for each client: these are compared, not the global model.

Sources: Li et al. 2021, Alg. 1 (Ditto); Deng et al. 2020, Alg. 1 (APFL); Huang et al. 2021 (FedAMP).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..model import Batch, Params, backward, gradient, minus, outputs, plus, softmax, square
from .run import Run


class _Personal(Run):
    """A run in which each client keeps a model of its own."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.own: dict[int, Params] = {}

    def result(self) -> Params:
        """Return all clients' models, ``k.name``; the first model for who has not trained yet."""
        clients = range(len(self.task.clients))
        return {f"{k}.{n}": a for k in clients for n, a in self.own.get(k, self.first).items()}


class Ditto(_Personal):
    """``u -= lr (grad F(u) + lam (u - w))`` beside FedAvg; u starts at the client's first w."""

    def client(self, k: int, visited: list[Params]) -> Params:
        """Train both models."""
        u = self.own.get(k, self.first if "from-first-model" in self.has else self.w)
        for batch in self.batches(k):
            step = plus(gradient(u, batch)[0], self.settings["lam"], minus(u, self.w))
            u = plus(u, -self.lr, step)
        self.own[k] = u
        return super().client(k, visited)


class APFL(_Personal):
    """u on the loss of ``a u + (1 - a) v``, and a by its own gradient, all from the old values."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.shares: dict[int, float] = {}

    def result(self) -> Params:
        """Return all clients' u, and a as ``k.alpha``."""
        clients = range(len(self.task.clients))
        shares = {
            f"{k}.alpha": np.array(self.shares.get(k, self.settings["alpha"])) for k in clients
        }
        return super().result() | shares

    def slopes(self, u: Params, v: Params, a: float, batch: Batch) -> tuple[Params, float]:
        """Return the gradients of the mixture's loss, with respect to u and to a."""
        if "mixed-logits" not in self.has:
            at_mixed, _ = gradient(plus(v, a, minus(u, v)), batch)
            rise = sum(float((d * at_mixed[n]).sum()) for n, d in minus(u, v).items())
            return {n: a * g for n, g in at_mixed.items()}, rise
        x, y = batch
        z_u, z_v = outputs(u, x)[1], outputs(v, x)[1]
        g = (softmax(a * z_u + (1 - a) * z_v) - np.eye(z_u.shape[1])[y]) / len(y)
        return backward(u, x, a * g), float((g * (z_u - z_v)).sum())

    def client(self, k: int, visited: list[Params]) -> Params:
        """Train v, u and a."""
        v, u = self.w, self.own.get(k, self.w)
        a = self.shares.get(k, self.settings["alpha"])
        for step, batch in enumerate(self.batches(k)):
            visited.append(dict(v))
            of_u, of_a = self.slopes(u, v, a, batch)
            v, u = plus(v, -self.lr, gradient(v, batch)[0]), plus(u, -self.lr, of_u)
            if "alpha-decays" in self.has:
                of_a += 0.02 * a
            if step == 0 or "alpha-once" not in self.has:
                a = min(max(a - self.lr * of_a, 0.0), 1.0)
        self.own[k], self.shares[k] = u, a
        return v


class FedAMP(_Personal):
    """``+ lam/alpha (v - u_k)`` from the client's cloud model u_k, to which alike models are drawn."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.clouds: dict[int, Params] = {}

    def client(self, k: int, visited: list[Params]) -> Params:
        """Train from the cloud model."""
        s = self.settings
        u = v = self.clouds.get(k, self.w)
        for batch in self.batches(k):
            visited.append(dict(v))
            grad = gradient(v, batch)[0]
            if "no-pull" not in self.has:
                grad = plus(grad, s["lam"] / s["alpha"], minus(v, u))
            v = plus(v, -self.lr, grad)
        return v

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Make the cloud models of all clients that have trained."""
        super().server(cohort, ends)
        self.own |= ends
        alpha, sigma = self.settings["alpha"], self.settings["sigma"]
        for k, v in self.own.items():
            self.clouds[k] = v
            for other in self.own.values():
                apart = minus(other, v)
                near = alpha * math.exp(-square(apart) / sigma) / sigma
                self.clouds[k] = plus(self.clouds[k], near, apart)
