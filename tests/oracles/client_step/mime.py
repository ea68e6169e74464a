"""Mime and MimeLite. Karimireddy et al. 2021, the boxes of both, base SGDm.

The server's statistics are the momentum m, which starts at 0 and stays as it is during a round:
``v -= eta ((1 - beta) g + beta m)``, then ``m <- (1 - beta) c + beta m`` once, on the server.
"""

from functools import partial
from typing import Any

import numpy as np

from tests.oracles.model import Params
from tests.oracles.rounds import mean_gradient, minus, plus, rounds_of, weights_of, zeros


def mime(
    w: Params, *run: Any, beta: float, lite: bool = False, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round, 0 <= beta < 1.

    A reply that is dropped counts in Mime's c: its full gradient has come before, in the first exchange; a
    client that falls out before that is not in ``cohorts``. ``lite`` is MimeLite: the full gradient comes
    with the reply. ``weighting`` weighs it in c, too.
    """
    m = zeros(w)
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        asked = r.used if lite else r.cohort
        c = zeros(w)  # sum_k p_k of the full gradients at the server's model
        for k, share in weights_of(r.clients, asked, weighting).items():
            c = plus(c, share, mean_gradient(w, r.clients[k], r.slope))

        def slope(v: Params, x: np.ndarray, y: np.ndarray) -> Params:
            g = r.slope(v, x, y)
            if not lite:  # SVRG's correction: - grad f(w_t; zeta) + c
                g = plus(minus(g, r.slope(w, x, y)), 1.0, c)
            return {n: (1.0 - beta) * g[n] + beta * m[n] for n in v}

        w = r.mean({k: r.descend(k, w, slope) for k in r.used})
        m = {n: beta * m[n] + (1.0 - beta) * c[n] for n in m}
        models.append(w)
    return models


mimelite = partial(mime, lite=True)
