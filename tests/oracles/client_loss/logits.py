"""FedLC and FedRS: cross-entropies of logits that a client's own label counts change.

Zhang et al. 2022, "Federated learning with label distribution skew via logits
calibration" (FedLC), and Li, Zhan 2021, "FedRS: federated learning with restricted softmax for label
distribution non-IID data". The counts n_c are of all the client's examples.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.oracles.averaged import Turn, averaged, sgd
from tests.oracles.model import Client, Params, dlogits_backprop
from tests.oracles.model import logits as outputs

Loss = Callable[[np.ndarray, np.ndarray], tuple[float, np.ndarray]]
"""(logits (B, c), labels (B,)) to (mean loss, d loss/d logits)."""


def counted(data: Client, classes: int) -> list[int]:
    """Return how many of the client's examples have each label."""
    counts = [0] * classes
    for _, labels in data:
        for label in labels:
            counts[int(label)] += 1
    return counts


def entropy(z: list[float], label: int) -> tuple[float, list[float]]:
    """Return -log softmax(z)_label and the softmax; where z is -inf a class has left it."""
    top = max(z)
    powers = [math.exp(value - top) for value in z]
    return top + math.log(sum(powers)) - z[label], [power / sum(powers) for power in powers]


def calibrated(counts: list[int], tau: float, absent: float | None) -> Loss:
    """Return FedLC's loss: the cross-entropy of ``z_c - tau n_c^(-1/4)``.

    A class with n_c = 0 leaves the softmax, or has ``absent`` for n_c.
    """
    margins = []
    for n in counts:
        size = float(n) if n or absent is None else absent
        margins.append(tau * size**-0.25 if size else math.inf if tau else 0.0)

    def of(z: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        value, g = 0.0, np.zeros_like(z)
        for b in range(len(y)):
            changed = [float(z[b, c]) - margins[c] for c in range(z.shape[1])]
            found, q = entropy(changed, int(y[b]))
            value += found / len(y)
            for c in range(z.shape[1]):
                g[b, c] = (q[c] - (1.0 if c == y[b] else 0.0)) / len(y)
        return value, g

    return of


def restricted(counts: list[int], alpha: float) -> Loss:
    """Return FedRS's loss: the cross-entropy of logits that are ``alpha z_c`` where n_c = 0."""
    scales = [1.0 if n else alpha for n in counts]

    def of(z: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        value, g = 0.0, np.zeros_like(z)
        for b in range(len(y)):
            changed = [float(z[b, c]) * scales[c] for c in range(z.shape[1])]
            found, q = entropy(changed, int(y[b]))
            value += found / len(y)
            for c in range(z.shape[1]):
                g[b, c] = scales[c] * (q[c] - (1.0 if c == y[b] else 0.0)) / len(y)
        return value, g

    return of


def down(loss: Loss, turn: Turn) -> Params:
    """Return v_k: SGD down ``loss`` from w_t."""

    def slope(v: Params, x: np.ndarray, y: np.ndarray) -> Params:
        return dlogits_backprop(v, x, loss(outputs(v, x), y)[1])

    return sgd(turn.w, turn.batches, turn.eta, slope=slope)


def fedlc(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    *args: Any,
    tau: float = 1.0,
    absent: float | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round; the other arguments as in ``rounds.averaged``.

    ``tau = 0`` is FedAvg.
    """

    def local(turn: Turn) -> Params:
        counts = counted(turn.data, len(w["2.bias"]))
        return down(calibrated(counts, tau, absent), turn)

    return averaged(local, w, clients, rounds, lr, *args, **how)


def fedrs(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    *args: Any,
    alpha: float = 0.5,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round; the other arguments as in ``rounds.averaged``.

    ``alpha = 1`` is FedAvg.
    """

    def local(turn: Turn) -> Params:
        return down(restricted(counted(turn.data, len(w["2.bias"])), alpha), turn)

    return averaged(local, w, clients, rounds, lr, *args, **how)
