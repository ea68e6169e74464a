"""SlowMo. Ozfatura et al. 2021, Alg. 2."""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, gradient


def slowmo(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "uniform",
    cohorts: list[list[int]] | None = None,
    *,
    beta: float,
    alpha: float = 1.0,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``."""
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    w_t = {name: value.copy() for name, value in w.items()}
    m_t = {name: np.zeros_like(value) for name, value in w.items()}  # gradient units, starts at 0
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

        changes = []
        for k in cohort:
            batches = clients[k]
            steps = epochs * len(batches) if local_steps is None else local_steps
            v = {name: value.copy() for name, value in w_t.items()}  # Alg. 2 line 4
            for step in range(steps):  # line 5
                x, y = batches[step % len(batches)]
                grad = gradient(v, x, y)  # line 6
                v = {name: v[name] - eta * grad[name] for name in v}  # line 7
            changes.append({name: w_t[name] - v[name] for name in v})  # line 10: D_k = w_t - v_k

        # line 12: pseudo-gradient (1/eta) sum_k p_k D_k
        g_bar = {
            name: sum(p[i] * changes[i][name] for i in range(len(cohort))) / eta for name in w_t
        }
        m_t = {name: beta * m_t[name] + g_bar[name] for name in w_t}  # line 14
        w_t = {name: w_t[name] - alpha * eta * m_t[name] for name in w_t}  # line 16, with m_{t+1}
        history.append(w_t)
    return history
