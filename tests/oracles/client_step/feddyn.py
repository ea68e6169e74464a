"""FedDyn. Acar et al. 2021, Alg. 1.

The paper's local objective is ``f_k(v) - <h_k, v> + alpha/2 |v - w_t|^2``, h_k being its gradient of the
client's loss at the end of the client's last turn. It is followed by SGD here, not minimised exactly.
"""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def feddyn(
    w: Params, *run: Any, alpha: float, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round, alpha > 0.

    All clients are the population N; the weights act in the mean of the models alone. A client that has
    lost its h_k begins at 0 again, and what it gave to h stays there.
    """
    h = zeros(w)
    own: dict[int, Params] = {}  # h_k
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        own = {k: zeros(w) if k in r.lost or r.t == 1 else own[k] for k in range(len(r.clients))}
        ends = {}
        for k in r.used:
            ends[k] = v = r.descend(
                k, w, lambda v, *at: plus(minus(r.slope(v, *at), own[k]), alpha, minus(v, w))
            )
            own[k] = plus(own[k], -alpha, minus(v, w))  # h_k <- h_k - alpha (v_k - w_t)
            h = plus(h, -alpha / len(r.clients), minus(v, w))  # h <- h - (alpha/N) sum_S D_k
        w = plus(r.mean(ends), -1.0 / alpha, h)  # mean v_k - h/alpha
        models.append(w)
    return models
