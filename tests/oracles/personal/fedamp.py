"""FedAMP. Huang et al. 2021, Alg. 1.

The paper is "Personalized cross-silo federated learning on non-IID data". With v_k client k's model,
``u_k = (1 - sum_{j != k} xi_kj) v_k + sum_{j != k} xi_kj v_j``, ``xi_kj = alpha A'(|v_k - v_j|^2)``,
``A'(x) = e^{-x/sigma}/sigma``. A client starts at u_k and trains ``f_k(v) + lam/(2 alpha) |v - u_k|^2``.

The paper has all clients in every round. Here v_k is the last model of client k that the server used, and
all clients that have one, in this round's cohort or not, are in the sums. A client that has none starts at
the global model, u_k = w_t: in round 1 that is the formula's u_k too, as all are at w_1. The global model,
which the paper does not have, is the mean of the v_k of a round.
"""

import math
from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, square


def clouds(own: dict[int, Params], alpha: float, sigma: float) -> dict[int, Params]:
    """Return every client's cloud model u_k, given its v_k."""
    made = {}
    for k, v in own.items():
        made[k] = v
        for j in own:
            apart = minus(own[j], v)
            made[k] = plus(made[k], alpha * math.exp(-square(apart) / sigma) / sigma, apart)
    return made


def fedamp(
    w: Params,
    *run: Any,
    lam: float,
    alpha: float,
    sigma: float,
    personal: list[dict[int, Params]] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the mean of the clients' models after each round.

    After each round, ``personal`` takes all clients' last v_k, whether or not the server used the reply.
    Training needs no state of the clients, so that ``lost`` changes nothing.
    """
    seen, made, u_next = dict[int, Params](), dict[int, Params](), dict[int, Params]()
    models = []
    for r in rounds_of(*run, **how):
        for k in r.trained:
            u = u_next.get(k, w)
            made[k] = r.descend(
                k, u, lambda v, *at: plus(r.slope(v, *at), lam / alpha, minus(v, u))
            )
        w = r.mean(made)
        models.append(w)
        seen |= {k: made[k] for k in r.used}
        u_next = clouds(seen, alpha, sigma)
        if personal is not None:
            personal.append(dict(made))
    return models
