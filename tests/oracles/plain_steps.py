"""Plain loops for tests/test_hook_contexts.py, in float64: steps through a client's batches, and means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Batch, Client, Params, features, gradient, loss


def copy(w: Params) -> Params:
    return {n: a.copy() for n, a in w.items()}


def examples(client: Client) -> int:
    return sum(len(y) for _, y in client)


def steps_of(
    w: Params, client: Client, steps: int, lr: float, force: Callable[[Params, Batch], Params]
) -> Params:
    """Take `steps` steps ``v -= lr force(v, batch)`` from `w`."""
    v = copy(w)
    for i in range(steps):
        f = force(v, client[i % len(client)])
        v = {n: v[n] - lr * f[n] for n in v}
    return v


def plain(v: Params, batch: Batch) -> Params:
    return gradient(v, *batch)


def moved(w: Params, client: Client, steps: int, lr: float) -> Params:
    """The update v_k - w of plain local steps."""
    v = steps_of(w, client, steps, lr, plain)
    return {n: v[n] - w[n] for n in w}


def mean_loss(w: Params, client: Client) -> float:
    """The mean over the client's examples, whatever the sizes of its batches."""
    return sum(len(y) * loss(w, x, y) for x, y in client) / examples(client)


def mean_gradient(w: Params, client: Client) -> Params:
    total = {n: np.zeros_like(a) for n, a in w.items()}
    for x, y in client:
        g = gradient(w, x, y)
        total = {n: total[n] + len(y) * g[n] for n in w}
    return {n: a / examples(client) for n, a in total.items()}


def mean_features(w: Params, client: Client) -> np.ndarray:
    total = sum(features(w, x).sum(axis=0) for x, _ in client)
    mean: np.ndarray = total / examples(client)
    return mean


def squared_norm(delta: Params) -> float:
    return float(sum((d**2).sum() for d in delta.values()))
