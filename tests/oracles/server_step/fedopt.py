"""Server optimisers over FedAvg's clients: FedAvgM, FedAdagrad, FedAdam, FedYogi.

Wang et al. 2021 (the field guide), Alg. 1; Reddi et al., "Adaptive Federated Optimization" (arXiv
2003.00295), Alg. 2. What enters the second moment is the round's own mean update, as in
that paper's later version.
"""

from typing import Any

import numpy as np

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def fedopt(
    w: Params,
    *run: Any,
    server: str,
    server_lr: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    momentum: float = 0.9,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round.

    ``server``: "momentum" (FedAvgM), "adagrad", "adam" or "yogi". The second moment begins at tau**2, as
    the paper asks v_{-1} >= tau**2.
    """
    m = zeros(w)
    second = {n: np.full_like(a, tau**2) for n, a in w.items()}
    models = []
    for r in rounds_of(*run, **how):
        # field-guide Alg. 1 line 14: sum_k p_k D_k; line 15: w <- ServerOpt(w, -delta, server_lr)
        delta = minus(r.mean({k: r.descend(k, w) for k in r.used}), w)
        if server == "momentum":
            m = plus(delta, momentum, m)
            w = plus(w, server_lr, m)
        else:
            m = {n: beta1 * m[n] + (1.0 - beta1) * delta[n] for n in w}  # no bias correction
            for n, d in delta.items():
                s, d2 = second[n], d**2
                second[n] = {
                    "adagrad": s + d2,
                    "yogi": s - (1.0 - beta2) * d2 * np.sign(s - d2),
                    "adam": beta2 * s + (1.0 - beta2) * d2,
                }[server]
            # x_{t+1} = x_t + eta_s m_t / (sqrt(v_t) + tau)
            w = {n: w[n] + server_lr * m[n] / (np.sqrt(second[n]) + tau) for n in w}
        models.append(w)
    return models
