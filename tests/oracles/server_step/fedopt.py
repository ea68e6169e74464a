"""Server optimisers over FedAvg's clients: SGD, FedAvgM, FedAdagrad, FedAdam, FedYogi.

Wang et al. 2021 (the field guide), Alg. 1; Reddi et al., "Adaptive Federated
Optimization" (arXiv 2003.00295), Alg. 2. That paper has two readings of its second moment, which
differ when beta1 > 0 (see ``second_moment`` below).
"""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, gradient


def fedopt(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "num-examples",
    cohorts: list[list[int]] | None = None,
    *,
    server: str,
    server_lr: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    momentum: float = 0.9,
    v0: float | None = None,
    second_moment: str = "momentum",
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``.

    ``server``: "sgd", "momentum" (FedAvgM), "adagrad", "adam" or "yogi". ``v0`` is the second
    moment before the first round (default tau**2; the paper asks v_{-1} >= tau**2).
    ``second_moment`` says whose square enters v: "momentum", the running mean
    D_t = beta1 D_{t-1} + (1 - beta1) mean_k D_k (that the algorithm calls Delta_t), or "mean", the
    round's own mean_k D_k (the paper's later version, where the running mean is called m_t).
    """
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    if server not in ("sgd", "momentum", "adagrad", "adam", "yogi"):
        raise ValueError(server)
    if second_moment not in ("momentum", "mean"):
        raise ValueError(second_moment)
    w_t = {name: value.copy() for name, value in w.items()}
    buf = {name: np.zeros_like(value) for name, value in w.items()}  # FedAvgM's v
    d_t = {name: np.zeros_like(value) for name, value in w.items()}  # running mean, starts at 0
    start = tau**2 if v0 is None else v0
    s_t = {name: np.full_like(value, start) for name, value in w.items()}  # second moment
    history = []
    for t in range(1, rounds + 1):
        eta = lr(t)
        cohort = list(range(len(clients))) if cohorts is None else cohorts[t - 1]

        # Aggregation weights p_k, normalised over the cohort.
        if weighting == "num-examples":
            n = [sum(len(y) for _, y in clients[k]) for k in cohort]
            p = [n_k / sum(n) for n_k in n]
        else:
            p = [1.0 / len(cohort) for _ in cohort]

        deltas = []
        for k in cohort:
            batches = clients[k]
            steps = epochs * len(batches) if local_steps is None else local_steps
            v = {name: value.copy() for name, value in w_t.items()}  # field-guide Alg. 1 line 5
            for step in range(steps):  # line 6
                x, y = batches[step % len(batches)]
                grad = gradient(v, x, y)  # line 7
                v = {name: v[name] - eta * grad[name] for name in v}  # line 8, ClientOpt = SGD
            deltas.append({name: v[name] - w_t[name] for name in v})  # line 11: D_k = v_k - w_t

        # field-guide Alg. 1 line 14: sum_k p_k D_k
        delta = {name: sum(p[i] * deltas[i][name] for i in range(len(cohort))) for name in w_t}

        # field-guide Alg. 1 line 15: w <- ServerOpt(w, pseudo-gradient = -delta, server_lr)
        if server == "sgd":
            w_t = {name: w_t[name] - server_lr * (-delta[name]) for name in w_t}
        elif server == "momentum":
            buf = {name: momentum * buf[name] + (-delta[name]) for name in w_t}
            w_t = {name: w_t[name] - server_lr * buf[name] for name in w_t}
        else:
            # Reddi Alg. 2: D_t = beta1 D_{t-1} + (1 - beta1) mean_k D_k, no bias correction
            d_t = {name: beta1 * d_t[name] + (1.0 - beta1) * delta[name] for name in w_t}
            square = {
                name: (d_t[name] if second_moment == "momentum" else delta[name]) ** 2
                for name in w_t
            }
            if server == "adagrad":  # v_t = v_{t-1} + D_t^2
                s_t = {name: s_t[name] + square[name] for name in w_t}
            elif server == "yogi":  # v_t = v_{t-1} - (1 - beta2) D_t^2 sign(v_{t-1} - D_t^2)
                s_t = {
                    name: s_t[name]
                    - (1.0 - beta2) * square[name] * np.sign(s_t[name] - square[name])
                    for name in w_t
                }
            else:  # adam: v_t = beta2 v_{t-1} + (1 - beta2) D_t^2
                s_t = {name: beta2 * s_t[name] + (1.0 - beta2) * square[name] for name in w_t}
            # x_{t+1} = x_t + eta_s D_t / (sqrt(v_t) + tau)
            w_t = {
                name: w_t[name] + server_lr * d_t[name] / (np.sqrt(s_t[name]) + tau) for name in w_t
            }
        history.append(w_t)
    return history
