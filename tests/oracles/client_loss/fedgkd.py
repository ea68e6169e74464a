"""FedGKD. Yao et al. 2021.

The paper is "Local-global knowledge distillation in heterogeneous federated learning with non-IID data".
The local loss is ``CE + (gamma/2) T^2 KL(teacher || student)``.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.oracles.averaged import Turn, averaged, sgd
from tests.oracles.model import Batch, Client, Params, dlogits_backprop, log_softmax, logits


def distillation(
    w: Params, teacher: Params, x: np.ndarray, temperature: float
) -> tuple[float, Params]:
    """Return ``T^2 KL(teacher || student)`` on one batch, its mean, and its gradient for ``w``."""
    z = logits(w, x)
    log_p = log_softmax(z / temperature)
    log_target = log_softmax(logits(teacher, x) / temperature)
    value, g = 0.0, np.zeros_like(z)
    for b in range(len(x)):
        for c in range(z.shape[1]):
            p = math.exp(log_target[b, c])
            value += temperature**2 * p * (log_target[b, c] - log_p[b, c]) / len(x)
            # d KL/d z_c = (softmax(z/T)_c - target_c) / T
            g[b, c] = temperature**2 * (math.exp(log_p[b, c]) - p) / temperature / len(x)
    return value, dlogits_backprop(w, x, g)


def mean(models: list[Params]) -> Params:
    """Return the mean of some models' parameters."""
    total = {name: np.zeros_like(value) for name, value in models[0].items()}
    for model in models:
        total = {name: total[name] + model[name] for name in total}
    return {name: total[name] / len(models) for name in total}


def fedgkd(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    *args: Any,
    gamma: float = 0.2,
    temperature: float = 1.0,
    buffer: int = 5,
    teachers: list[Params] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round; the other arguments as in ``rounds.averaged``.

    Round t's teacher is the mean of the last ``buffer`` (M) global models, w_t the newest of them; in the
    first M - 1 rounds of all there are. ``teachers`` is a list that takes each round's.
    """
    last = [w]

    def local(turn: Turn) -> Params:
        teacher = mean(last)

        def more(v: Params, batch: Batch) -> Params:
            _, g = distillation(v, teacher, batch[0], temperature)
            return {name: gamma / 2.0 * g[name] for name in g}

        return sgd(turn.w, turn.batches, turn.eta, more)

    def after(new: Params, _used: dict[int, Params]) -> None:
        if teachers is not None:
            teachers.append(mean(last))
        last.append(new)
        del last[:-buffer]

    return averaged(local, w, clients, rounds, lr, *args, after=after, **how)
