"""q-FedAvg. Li et al. 2020, Alg. 2, with L = 1/eta.

``Dw_k = L (w_t - v_k)``, ``D_k = F_k^q Dw_k``, ``h_k = q F_k^(q-1) |Dw_k|^2 + L F_k^q``, and the server
takes ``w_{t+1} = w_t - sum D_k / sum h_k``, with F_k the client's mean loss at w_t.
"""

from typing import Any

from tests.oracles.model import Params, loss
from tests.oracles.rounds import examples, minus, plus, rounds_of, square, zeros


def qfedavg(w: Params, *run: Any, q: float, **how: Any) -> list[Params]:
    """Return the global model after each round, ``q`` >= 0; the weighting plays no part."""
    models = []
    for r in rounds_of(*run, **how):
        lipschitz = 1.0 / r.eta  # L
        above, below = zeros(w), 0.0
        for k in r.used:
            data = r.clients[k]  # F_k is over all examples
            f = sum(len(y) / examples(data) * loss(w, x, y) for x, y in data)
            if q < 1.0:
                f = max(f, 1e-12)
            dw = {n: lipschitz * a for n, a in minus(w, r.descend(k, w)).items()}
            above = plus(above, f**q, dw)
            below += q * f ** (q - 1.0) * square(dw) + lipschitz * f**q
        w = plus(w, -1.0 / below, above)
        models.append(w)
    return models
