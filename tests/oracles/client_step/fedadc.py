"""FedADC. Ozfatura et al. 2021, Alg. 3 (red, blue) and Alg. 4 (double momentum)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.oracles.model import Client, Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def fedadc(
    w: Params,
    *run: Any,
    beta_local: float,
    beta_global: float,
    alpha: float = 1.0,
    variant: str = "nesterov",
    local_momentum: float | None = None,
    incomplete: str = "average",
    weighting: str = "uniform",
    local: Callable[[Params, Client, Params, np.ndarray, np.ndarray], Params] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round.

    ``variant``: "nesterov" (Alg. 3, red) or "heavy-ball" (Alg. 3, blue). With ``local_momentum``
    (phi) the round is Alg. 4's instead: ``variant`` and ``beta_global`` then have no part, as
    Alg. 4 has one local step, one beta (here ``beta_local``) and the server line m = mean change.

    The momentum of clients whose step budget ends before their E steps is divided by the budget under
    "average", by E under "scale", where their change weighs E / s_k times as much. ``local(w_t, data, v, x,
    y)`` is the gradient of a local loss of FedADC+.
    """
    m = zeros(w)  # gradient units, starts at 0
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        scaled = incomplete == "scale"
        delta = zeros(w)
        for k in r.used:
            v, u = w, zeros(w)  # Alg. 3 line 4; u is Alg. 4's local momentum
            # line 5, H being the client's own number of steps K_k, or E
            m_bar = {n: beta_local * m[n] / (r.planned if scaled else r.steps)[k] for n in v}
            for step, (x, y) in enumerate(r.batches(k)):  # line 6
                if variant == "nesterov" and local_momentum is None:
                    v = plus(v, -r.eta, m_bar)  # line 7 (red)
                grad = local(w, r.clients[k], v, x, y) if local else r.slope(v, x, y)  # lines 8, 10
                if local_momentum is not None:
                    phi = 0.0 if step == 0 else local_momentum  # Alg. 4 lines 9, 10, 12
                    grad = u = {n: phi * u[n] + (1.0 - phi) * grad[n] for n in v}
                v = plus(v, -r.eta, grad)  # line 9 (red)
                if variant != "nesterov" or local_momentum is not None:
                    v = plus(v, -r.eta, m_bar)  # line 11 (blue), Alg. 4 line 14
            weight = r.p[k] * (r.planned[k] / r.steps[k] if scaled else 1.0)
            # lines 14, 16 (Alg. 4 line 19): mean change in gradient units, (1/eta) sum_k p_k (w_t - v_k)
            delta = plus(delta, weight / r.eta, minus(w, v))
        # Alg. 3 line 17; Alg. 4 line 21
        m = delta if local_momentum is not None else plus(delta, beta_global - beta_local, m)
        w = plus(w, -alpha * r.eta, m)  # Alg. 3 line 19 (Alg. 4 line 23), with m_{t+1}
        models.append(w)
    return models
