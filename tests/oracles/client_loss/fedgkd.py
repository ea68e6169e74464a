"""FedGKD. Yao et al. 2021.

The paper is "Local-global knowledge distillation in heterogeneous federated learning with non-IID data".
The local loss is ``CE + (gamma/2) T^2 KL(teacher || student)``.
"""

import math
from typing import Any

import numpy as np

from tests.oracles.model import Params, dlogits_backprop, log_softmax, logits
from tests.oracles.rounds import plus, rounds_of, zeros


def distillation(w: Params, teacher: Params, x: np.ndarray, temperature: float) -> Params:
    """Return the gradient for ``w`` of the mean of ``T^2 KL(teacher || student)`` over one batch."""
    z = logits(w, x)
    log_p = log_softmax(z / temperature)
    log_target = log_softmax(logits(teacher, x) / temperature)
    g = np.zeros_like(z)
    for b in range(len(x)):
        for c in range(z.shape[1]):
            p = math.exp(log_target[b, c])
            # d KL/d z_c = (softmax(z/T)_c - target_c) / T
            g[b, c] = temperature**2 * (math.exp(log_p[b, c]) - p) / temperature / len(x)
    return dlogits_backprop(w, x, g)


def fedgkd(
    w: Params, *run: Any, gamma: float = 0.2, temperature: float = 1.0, buffer: int = 5, **how: Any
) -> list[Params]:
    """Return the global model after each round.

    Round t's teacher is the mean of the last ``buffer`` (M) global models, w_t the newest of them; in the
    first M - 1 rounds of all there are.
    """
    models = [w]
    for r in rounds_of(*run, **how):
        teacher, last = zeros(w), models[-buffer:]
        for model in last:
            teacher = plus(teacher, 1.0 / len(last), model)

        def slope(v: Params, x: np.ndarray, y: np.ndarray) -> Params:
            return plus(r.slope(v, x, y), gamma / 2.0, distillation(v, teacher, x, temperature))

        models.append(r.mean({k: r.descend(k, models[-1], slope) for k in r.used}))
    return models[1:]
