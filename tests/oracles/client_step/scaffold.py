"""SCAFFOLD. Karimireddy et al. 2020, Alg. 1."""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import mean_gradient, minus, plus, rounds_of, zeros


def scaffold(
    w: Params,
    *run: Any,
    option: int = 2,
    server_lr: float = 1.0,
    weighting: str = "uniform",
    **how: Any,
) -> list[Params]:
    """Return the global model after each round.

    All clients are the population N. One that has lost its c_k begins at 0, and its old share stays in c.
    """
    c = zeros(w)
    own: dict[int, Params] = {}  # c_k
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        own = {k: zeros(w) if k in r.lost or r.t == 1 else own[k] for k in range(len(r.clients))}
        ends, risen = {}, c
        for k in r.used:
            # lines 8-11
            v = r.descend(k, w, lambda *at: plus(minus(r.slope(*at), own[k]), 1.0, c))
            # c_k+, line 13: the gradient of the client's whole loss at w_t, or of its mean step
            if option == 1:
                new = mean_gradient(w, r.clients[k], r.slope)
            else:
                new = plus(minus(own[k], c), 1.0 / (r.steps[k] * r.eta), minus(w, v))
            ends[k] = v
            risen = plus(risen, 1.0 / len(r.clients), minus(new, own[k]))
            own[k] = new  # line 14
        w = plus(w, server_lr, minus(r.mean(ends), w))  # lines 16, 17
        c = risen
        models.append(w)
    return models
