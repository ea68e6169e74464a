"""FedCurv. Shoham et al. 2019, Eqs. 4-6."""

from typing import Any

import numpy as np

from tests.oracles.client_step.efl import fisher, float32
from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def fedcurv(w: Params, *run: Any, lam: float, implicit: bool = False, **how: Any) -> list[Params]:
    """Return the global model after each round.

    ``implicit`` divides the local gradient by 1 + 2 eta lam (U - u_k). A client that has lost what it kept
    subtracts nothing of its own; a reply that is dropped changes nothing. u_k, then u_k * v_k, their sums,
    and what is left of these without the client's own, are rounded to float32.
    """
    none = zeros(w), zeros(w)
    last: dict[int, tuple[Params, Params]] = {}  # client -> its u_k, v^_k of round t-1, if used
    models = []
    for r in rounds_of(*run, **how):
        # U = sum u_k, V = sum v^_k over the replies of round t-1
        u_sum, v_sum = none
        for u, v in last.values():
            u_sum, v_sum = plus(u_sum, 1.0, u), plus(v_sum, 1.0, v)
        u_sum, v_sum = float32(u_sum), float32(v_sum)
        ends, fishers = {}, {}
        for k in r.used:
            u_own, v_own = none if k in r.lost else last.get(k, none)
            # a sum of squares; only rounding can make it negative
            u_rest = float32({n: np.maximum(a, 0.0) for n, a in minus(u_sum, u_own).items()})
            v_rest = float32(minus(v_sum, v_own))
            v = w
            for x, y in r.batches(k):
                # Eq. 6: grad += 2 lam ((U - u_k) * v - (V - v^_k))
                pull = {n: u_rest[n] * v[n] - v_rest[n] for n in v}
                grad = plus(r.slope(v, x, y), 2.0 * lam, pull)
                if implicit:
                    grad = {n: grad[n] / (1.0 + 2.0 * r.eta * lam * u_rest[n]) for n in v}
                v = plus(v, -r.eta, grad)
            ends[k] = v
            u_k = float32(fisher(v, r.clients[k]))
            fishers[k] = u_k, float32({n: u_k[n] * v[n] for n in v})
        w, last = r.mean(ends), fishers
        models.append(w)
    return models
