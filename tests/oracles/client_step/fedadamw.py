"""FedAdamW. Liu et al. 2026.

Clients take AdamW's steps (torch's, decoupled weight decay). First moments start at 0 in each round, second
moments and the step count at the plain means of those with which the last round's used replies ended. Where
all take K steps, the count is (t - 1) K. Both bias corrections use it.
"""

from typing import Any

import numpy as np

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def fedadamw(
    w: Params,
    *run: Any,
    gamma: float = 0.5,
    decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weighting: str = "uniform",
    **how: Any,
) -> list[Params]:
    """Return the global model after each round.

    After each AdamW step, ``v += gamma (w_t - w_{t-1}) / K_k``, K_k the steps that client k has time for;
    in round 1 there is no such step.
    """
    second, change = zeros(w), zeros(w)  # the mean second moments; w_t - w_{t-1}
    begun = 0.0  # the run's step count
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        ends, seconds = {}, {}
        for k in r.used:
            v, m, s = w, zeros(w), second
            count = begun
            for x, y in r.batches(k):
                count += 1
                g = r.slope(v, x, y)
                m = {n: beta1 * m[n] + (1 - beta1) * g[n] for n in v}
                s = {n: beta2 * s[n] + (1 - beta2) * g[n] ** 2 for n in v}
                v = {n: v[n] * (1 - r.eta * decay) for n in v}
                for n in v:
                    m_hat, s_hat = m[n] / (1 - beta1**count), s[n] / (1 - beta2**count)
                    v[n] = v[n] - r.eta * m_hat / (np.sqrt(s_hat) + eps)
                v = plus(v, gamma / r.steps[k], change)
            ends[k], seconds[k] = v, s
        mean, second = r.mean(ends), zeros(w)
        for s in seconds.values():
            second = plus(second, 1.0 / len(seconds), s)
        begun += sum(r.steps[k] for k in seconds) / len(seconds)
        w, change = mean, minus(mean, w)
        models.append(w)
    return models
