"""FedExP. Jhunjhunwala et al. 2023, Alg. 1.

``eta_g = max(1, sum |D_k|^2 / (2 M (|D|^2 + eps)))`` over the M replies, D their mean; then
``w_{t+1} = w_t + eta_g D``. With weights p_k of their own, sum_k p_k |D_k|^2 takes the place of the mean.
"""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, square


def fedexp(
    w: Params,
    *run: Any,
    eps: float,
    weighting: str = "uniform",
    averages: list[Params] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round, ``eps`` >= 0.

    ``averages`` is a list that takes the mean of the last two models of each round, which the paper
    evaluates.
    """
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        deltas = {k: minus(r.descend(k, w), w) for k in r.used}
        mean = r.mean(deltas)
        spread = sum(r.p[k] * square(deltas[k]) for k in r.used)
        below = 2.0 * (square(mean) + eps)
        eta_g = 1.0 if spread <= below else spread / below  # also where both are 0
        if averages is not None:
            averages.append(plus(w, eta_g / 2.0, mean))
        w = plus(w, eta_g, mean)
        models.append(w)
    return models
