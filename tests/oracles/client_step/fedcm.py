"""FedCM. Xu et al. 2021, Alg. 2.

``v -= eta (alpha grad f + (1 - alpha) D_t)``, D_t the last global step as a gradient of one local step.
"""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def fedcm(
    w: Params, *run: Any, alpha: float, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round, 0 < alpha <= 1.

    Round 1 has no last step: it is FedAvg's, where the paper's D_1 of 0 has alpha shrink it.
    """
    step = zeros(w)  # (w_{t-1} - w_t)/eta, the eta of round t-1
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        ends = {}
        share = 1.0 if r.t == 1 else alpha
        for k in r.used:
            rest = {n: (1.0 - share) * d / r.steps[k] for n, d in step.items()}
            ends[k] = r.descend(k, w, lambda *at: plus(rest, share, r.slope(*at)))
        w_next = r.mean(ends)
        step = {n: a / r.eta for n, a in minus(w, w_next).items()}
        w = w_next
        models.append(w)
    return models
