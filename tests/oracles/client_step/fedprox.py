"""FedProx. Li et al. 2020, Alg. 2; Tian et al. 2022, Eq. 8."""

from typing import Any

import numpy as np

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of


def fedprox(w: Params, *run: Any, mu: float, implicit: bool = False, **how: Any) -> list[Params]:
    """Return the global model after each round, ``mu`` >= 0.

    ``implicit`` divides the local gradient by 1 + eta mu.
    """
    models = []
    for r in rounds_of(*run, **how):
        by = 1.0 + r.eta * mu if implicit else 1.0

        def slope(v: Params, x: np.ndarray, y: np.ndarray) -> Params:
            # f_k(v) + mu/2 |v - w_t|^2, so grad += mu (v - w_t)
            return {n: g / by for n, g in plus(r.slope(v, x, y), mu, minus(v, w)).items()}

        w = r.mean({k: r.descend(k, w, slope) for k in r.used})
        models.append(w)
    return models
