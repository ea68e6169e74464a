"""FedSAM and FedLESAM. Qu et al. 2022, Alg. 1; Fan et al. 2024, Alg. 1.

Both take each gradient at ``v + rho d/|d|`` on the same batch: d is that batch's gradient at v in FedSAM,
and ``w_old - w_t`` in FedLESAM. Where d is 0 or missing the gradient is taken at v.
"""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, square


def ahead(v: Params, rho: float, d: Params) -> Params:
    """Return v + rho d/|d|, all arrays as one vector; v where d is 0."""
    length = square(d) ** 0.5
    return v if length == 0.0 else plus(v, rho / length, d)


def fedsam(
    w: Params, *run: Any, rho: float, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round, ``rho`` >= 0."""
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        ends = {}
        for k in r.used:
            v = w
            for x, y in r.batches(k):
                v = plus(v, -r.eta, r.slope(ahead(v, rho, r.slope(v, x, y)), x, y))
            ends[k] = v
        w = r.mean(ends)
        models.append(w)
    return models


def fedlesam(
    w: Params, *run: Any, rho: float, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round, ``rho`` >= 0.

    Each client of the cohort receives the model, and keeps it until its next turn, whether its reply is
    used or not.
    """
    last: dict[int, Params] = {}  # client -> w_old
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        for k in r.lost:
            last.pop(k, None)
        ends = {}
        for k in r.used:
            v, d = w, minus(last.get(k, w), w)
            for x, y in r.batches(k):
                v = plus(v, -r.eta, r.slope(ahead(v, rho, d), x, y))
            ends[k] = v
        last |= dict.fromkeys(r.trained, w)
        w = r.mean(ends)
        models.append(w)
    return models
