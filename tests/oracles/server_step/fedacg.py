"""FedACG. Kim et al. 2024, Alg. 1: clients begin where the server's momentum leads."""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def fedacg(
    w: Params,
    *run: Any,
    lam: float = 0.85,
    mu: float = 0.01,
    weighting: str = "uniform",
    iterates: list[Params] | None = None,
    **how: Any,
) -> list[Params]:
    """Return ``z = w + lam m`` after each round: what the server sends next.

    ``iterates`` is a list that takes w after each round, the paper's model.
    """
    m = zeros(w)
    sent = []
    for r in rounds_of(*run, weighting=weighting, **how):
        z = plus(w, lam, m)

        def slope(v: Params, *at: Any) -> Params:  # of f_k(v) + mu/2 |v - z|^2
            return plus(r.slope(v, *at), mu, minus(v, z))

        w = r.mean({k: r.descend(k, z, slope) for k in r.used})
        m = plus(minus(w, z), lam, m)  # m <- lam m + mean (v_k - z)
        sent.append(plus(w, lam, m))
        if iterates is not None:
            iterates.append(w)
    return sent
