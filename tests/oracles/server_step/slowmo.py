"""SlowMo. Ozfatura et al. 2021, Alg. 2."""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def slowmo(
    w: Params, *run: Any, beta: float, alpha: float = 1.0, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round."""
    m = zeros(w)  # gradient units, starts at 0
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        change = minus(w, r.mean({k: r.descend(k, w) for k in r.used}))  # lines 4-10
        m = {n: beta * m[n] + change[n] / r.eta for n in w}  # lines 12, 14
        w = plus(w, -alpha * r.eta, m)  # line 16, with m_{t+1}
        models.append(w)
    return models
