"""FedFOR. Tian et al. 2022, Eqs. 4-7 and Alg. 1 (formulas lost in the text)."""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, gradient


def fedfor(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "num-examples",
    cohorts: list[list[int]] | None = None,
    *,
    alpha: float | None,
    momentum: float = 0.0,
    max_steps: list[int] | None = None,
) -> list[Params]:
    """Return the global model after each round; arguments as in ``fedavg``, ``alpha`` >= 0.

    ``alpha`` None is the default, 2 (1 - m) / K_k. ``momentum`` is m, of the clients' heavy-ball
    SGD, fresh each round; ``max_steps[k]`` is the step budget of client k, known beforehand.
    """
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    w_t = {name: value.copy() for name, value in w.items()}
    g: Params | None = None  # Alg. 1: the first round has no previous global step
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
            steps = epochs * len(batches) if local_steps is None else local_steps  # K_k
            if max_steps is not None:
                steps = min(steps, max_steps[k])
            strength = 2.0 * (1.0 - momentum) / steps if alpha is None else alpha
            v = {name: value.copy() for name, value in w_t.items()}
            buffer = {name: np.zeros_like(value) for name, value in w_t.items()}
            for step in range(steps):
                x, y = batches[step % len(batches)]
                grad = gradient(v, x, y)
                if g is not None:
                    # Eq. 7: f_k(v) + alpha sum_j h_j g_j (v_j - w_tj),
                    #        h_j = 1 where g_j (v_j - w_tj) > 0, else 0
                    for name in v:
                        h = np.where(g[name] * (v[name] - w_t[name]) > 0.0, 1.0, 0.0)
                        grad[name] = grad[name] + strength * h * g[name]
                buffer = {name: momentum * buffer[name] + grad[name] for name in v}
                v = {name: v[name] - eta * buffer[name] for name in v}
            deltas.append({name: v[name] - w_t[name] for name in v})

        # FedAvg's server: w_{t+1} = w_t + sum_k p_k D_k
        delta = {name: sum(p[i] * deltas[i][name] for i in range(len(cohort))) for name in w_t}
        w_next = {name: w_t[name] + delta[name] for name in w_t}
        # for round t+1: g = (w_t - w_{t+1}) / eta, the eta of this round, which made the step
        g = {name: (w_t[name] - w_next[name]) / eta for name in w_t}
        w_t = w_next
        history.append(w_t)
    return history
