"""FedNTD. Lee et al. 2022, Alg. 1.

The paper is "Preservation of the global knowledge by not-true distillation in federated learning". The
local loss is ``CE + beta L_NTD``.
"""

import math
from typing import Any

import numpy as np

from tests.oracles.model import Params, dlogits_backprop, log_softmax, logits
from tests.oracles.rounds import plus, rounds_of


def not_true(z: np.ndarray, y: np.ndarray, tau: float) -> np.ndarray:
    """Return log softmax(z/tau) (B, c - 1) over the classes other than the true one, in their order."""
    others = [[z[b, i] / tau for i in range(z.shape[1]) if i != y[b]] for b in range(len(y))]
    return log_softmax(np.array(others))


def distillation(w: Params, w_global: Params, x: np.ndarray, y: np.ndarray, tau: float) -> Params:
    """Return the gradient for ``w`` of the mean of ``tau^2 KL(q_g || q)`` over one batch.

    q and q_g are the softmaxes of the model's and of the global model's not-true logits; q_g is constant.
    """
    z = logits(w, x)
    log_q, log_teacher = not_true(z, y, tau), not_true(logits(w_global, x), y, tau)
    g = np.zeros_like(z)
    for b in range(len(y)):
        others = [i for i in range(z.shape[1]) if i != y[b]]
        for j, i in enumerate(others):
            p = math.exp(log_teacher[b, j])
            # d KL(q_g || q)/d z_i = (q_i - q_g,i) / tau; the true class's logit has no part in it
            g[b, i] = tau**2 * (math.exp(log_q[b, j]) - p) / tau / len(y)
    return dlogits_backprop(w, x, g)


def fedntd(w: Params, *run: Any, beta: float = 1.0, tau: float = 1.0, **how: Any) -> list[Params]:
    """Return the global model after each round."""
    models = []
    for r in rounds_of(*run, **how):

        def slope(v: Params, x: np.ndarray, y: np.ndarray) -> Params:
            return plus(r.slope(v, x, y), beta, distillation(v, w, x, y, tau))

        w = r.mean({k: r.descend(k, w, slope) for k in r.used})
        models.append(w)
    return models
