"""FedFOR. Tian et al. 2022, Eqs. 4-7 and Alg. 1 (formulas lost in the text)."""

from typing import Any

import numpy as np

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def fedfor(
    w: Params, *run: Any, alpha: float | None, momentum: float = 0.0, **how: Any
) -> list[Params]:
    """Return the global model after each round, ``alpha`` >= 0.

    ``alpha`` None is the default, 2 (1 - m) / K_k. ``momentum`` is m, of the clients' heavy-ball
    SGD, fresh each round.
    """
    g = zeros(w)  # Alg. 1: the first round has no previous global step
    models = []
    for r in rounds_of(*run, **how):
        ends = {}
        for k in r.used:
            strength = 2.0 * (1.0 - momentum) / r.steps[k] if alpha is None else alpha
            v, buffer = w, zeros(w)
            for x, y in r.batches(k):
                # Eq. 7: f_k(v) + alpha sum_j h_j g_j (v_j - w_tj),
                #        h_j = 1 where g_j (v_j - w_tj) > 0, else 0
                force = {n: np.where(g[n] * (v[n] - w[n]) > 0.0, g[n], 0.0) for n in v}
                grad = plus(r.slope(v, x, y), strength, force)
                buffer = plus(grad, momentum, buffer)
                v = plus(v, -r.eta, buffer)
            ends[k] = v
        w_next = r.mean(ends)
        # for round t+1: g = (w_t - w_{t+1}) / eta, the eta of this round, which made the step
        g = {n: a / r.eta for n, a in minus(w, w_next).items()}
        w = w_next
        models.append(w)
    return models
