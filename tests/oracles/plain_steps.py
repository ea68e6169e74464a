"""Plain loops for tests/test_hook_contexts.py, in float64: steps of one client, and means over its data."""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Batch, Client, Params, gradient
from tests.oracles.model import features as features
from tests.oracles.model import loss as loss
from tests.oracles.rounds import examples, minus, plus
from tests.oracles.rounds import mean_gradient as mean_gradient
from tests.oracles.rounds import square as square


def steps_of(
    w: Params, client: Client, steps: int, lr: float, force: Callable[[Params, Batch], Params]
) -> Params:
    """Take `steps` steps ``v -= lr force(v, batch)`` from `w`."""
    for i in range(steps):
        w = plus(w, -lr, force(w, client[i % len(client)]))
    return w


def plain(v: Params, batch: Batch) -> Params:
    return gradient(v, *batch)


def moved(w: Params, client: Client, steps: int, lr: float) -> Params:
    """The update v_k - w of plain local steps."""
    return minus(steps_of(w, client, steps, lr, plain), w)


def mean_loss(w: Params, client: Client) -> float:
    """The mean over the client's examples, whatever the sizes of its batches."""
    return sum(len(y) * loss(w, x, y) for x, y in client) / examples(client)


def mean_features(w: Params, client: Client) -> np.ndarray:
    mean: np.ndarray = features(w, np.concatenate([x for x, _ in client])).mean(axis=0)
    return mean
