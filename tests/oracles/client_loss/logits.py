"""FedLC and FedRS: cross-entropies of logits that a client's own label counts change.

Zhang et al. 2022, "Federated learning with label distribution skew via logits
calibration" (FedLC), and Li, Zhan 2021, "FedRS: federated learning with restricted softmax for label
distribution non-IID data". The counts n_c are of all the client's examples.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.oracles.model import Client, Params, dlogits_backprop
from tests.oracles.model import logits as outputs
from tests.oracles.rounds import rounds_of

Slope = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(logits (B, c), labels (B,)) to the gradient of the mean loss for the logits."""


def counted(data: Client, classes: int) -> list[int]:
    """Return how many of the client's examples have each label."""
    return [sum(int((y == c).sum()) for _, y in data) for c in range(classes)]


def softmax(z: list[float]) -> list[float]:
    """Return the softmax; where z is -inf a class has left it."""
    top = max(z)
    powers = [math.exp(value - top) for value in z]
    return [power / sum(powers) for power in powers]


def changed(scales: list[float], margins: list[float]) -> Slope:
    """Return the slope of the cross-entropy of ``scale_c z_c - margin_c``."""

    def of(z: np.ndarray, y: np.ndarray) -> np.ndarray:
        g, classes = np.zeros_like(z), range(z.shape[1])
        for b in range(len(y)):
            q = softmax([float(z[b, c]) * scales[c] - margins[c] for c in classes])
            for c in classes:
                g[b, c] = scales[c] * (q[c] - (1.0 if c == y[b] else 0.0)) / len(y)
        return g

    return of


def calibrated(counts: list[int], tau: float, absent: float | None) -> Slope:
    """Return the slope of FedLC's loss, the cross-entropy of ``z_c - tau n_c^(-1/4)``.

    A class with n_c = 0 leaves the softmax, or has ``absent`` for n_c.
    """
    margins = []
    for n in counts:
        size = float(n) if n or absent is None else absent
        margins.append(tau * size**-0.25 if size else math.inf if tau else 0.0)
    return changed([1.0] * len(counts), margins)


def restricted(counts: list[int], alpha: float) -> Slope:
    """Return the slope of FedRS's loss, the cross-entropy of logits ``alpha z_c`` where n_c = 0."""
    return changed([1.0 if n else alpha for n in counts], [0.0] * len(counts))


def trained(
    w: Params, run: Any, how: dict[str, Any], slope_of: Callable[[list[int]], Slope]
) -> list[Params]:
    """Return the global model after each round; each client goes down the loss of its counts."""
    models = []
    for r in rounds_of(*run, **how):
        ends = {}
        for k in r.used:
            slope = slope_of(counted(r.clients[k], len(w["2.bias"])))
            ends[k] = r.descend(
                k, w, lambda v, x, y: dlogits_backprop(v, x, slope(outputs(v, x), y))
            )
        w = r.mean(ends)
        models.append(w)
    return models


def fedlc(
    w: Params, *run: Any, tau: float = 1.0, absent: float | None = None, **how: Any
) -> list[Params]:
    """Return the global model after each round; ``tau = 0`` is FedAvg."""
    return trained(w, run, how, lambda counts: calibrated(counts, tau, absent))


def fedrs(w: Params, *run: Any, alpha: float = 0.5, **how: Any) -> list[Params]:
    """Return the global model after each round; ``alpha = 1`` is FedAvg."""
    return trained(w, run, how, lambda counts: restricted(counts, alpha))
