"""Clients with quadratic losses, for the oracles' own tests: where a method settles is known by hand.

An example is a curvature a and a centre c, with the loss ``a/2 (v - c)^2`` of the one parameter v. A
client's two batches differ, in size too.
"""

import numpy as np

from tests.oracles.model import Client, Params

CLIENTS: list[Client] = [
    [(np.array([1.0, 3.0]), np.array([2.0, -1.0])), (np.array([0.5]), np.array([4.0]))],
    [(np.array([4.0]), np.array([-3.0])), (np.array([1.0, 2.0, 1.0]), np.array([0.0, 1.0, 5.0]))],
    [(np.array([2.0]), np.array([7.0])), (np.array([2.5]), np.array([6.0]))],
]
START: Params = {"v": np.array([0.3])}


def whole(clients: list[Client]) -> list[Client]:
    """Return the clients with all their examples in one batch: no noise from batches."""
    return [
        [(np.concatenate([x for x, _ in c]), np.concatenate([y for _, y in c]))] for c in clients
    ]


def slope(w: Params, x: np.ndarray, y: np.ndarray) -> Params:
    """Return the gradient of the mean of ``a/2 (v - c)^2`` over a batch."""
    return {"v": np.array([x @ (w["v"][0] - y) / len(y)])}


def minimum(clients: list[Client], weights: list[float]) -> float:
    """Return where the weighted mean of the clients' losses is least."""
    above = sum(p * np.mean(x * y) for p, [(x, y)] in zip(weights, whole(clients), strict=True))
    below = sum(p * np.mean(x) for p, [(x, _)] in zip(weights, whole(clients), strict=True))
    return float(above / below)
