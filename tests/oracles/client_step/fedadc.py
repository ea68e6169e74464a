"""FedADC. Ozfatura et al. 2021, Alg. 3 (red, blue) and Alg. 4 (double momentum)."""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, gradient


def fedadc(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "uniform",
    cohorts: list[list[int]] | None = None,
    *,
    beta_local: float,
    beta_global: float,
    alpha: float = 1.0,
    variant: str = "nesterov",
    local_momentum: float | None = None,
    steps_done: list[dict[int, int]] | None = None,
    incomplete: str = "average",
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``.

    ``steps_done``: for each round, the clients whose step budget ends before their E steps: their
    momentum is divided by the budget under "average", by E under "scale", where their change weighs
    E / s_k times as much.

    ``variant``: "nesterov" (Alg. 3, red) or "heavy-ball" (Alg. 3, blue). With ``local_momentum``
    (phi) the round is Alg. 4's instead: ``variant`` and ``beta_global`` then have no part, as
    Alg. 4 has one local step, one beta (here ``beta_local``) and the server line m = mean change.
    """
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    if variant not in ("nesterov", "heavy-ball"):
        raise ValueError(variant)
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
        for i, k in enumerate(cohort):
            batches = clients[k]
            planned = epochs * len(batches) if local_steps is None else local_steps  # E
            steps = planned if steps_done is None else steps_done[t - 1].get(k, planned)  # K_k
            v = {name: value.copy() for name, value in w_t.items()}  # Alg. 3 line 4
            # line 5, H being the client's own number of steps K_k, or E
            divisor = planned if incomplete == "scale" else steps
            if incomplete == "scale":
                p[i] = p[i] * planned / steps
            m_bar = {name: beta_local * m_t[name] / divisor for name in v}
            u: Params = {}  # Alg. 4's local momentum
            for step in range(steps):  # line 6
                x, y = batches[step % len(batches)]
                if local_momentum is not None:
                    phi = local_momentum
                    grad = gradient(v, x, y)  # Alg. 4 line 7
                    if step == 0:  # line 9
                        u = grad  # line 10
                    else:
                        u = {name: u[name] * phi + (1.0 - phi) * grad[name] for name in v}  # 12
                    v = {name: v[name] - eta * (m_bar[name] + u[name]) for name in v}  # line 14
                elif variant == "nesterov":
                    v_half = {name: v[name] - eta * m_bar[name] for name in v}  # line 7 (red)
                    grad = gradient(v_half, x, y)  # line 8 (red)
                    v = {name: v_half[name] - eta * grad[name] for name in v}  # line 9 (red)
                else:
                    grad = gradient(v, x, y)  # line 10 (blue)
                    v = {name: v[name] - eta * (grad[name] + m_bar[name]) for name in v}  # line 11
            changes.append({name: w_t[name] - v[name] for name in v})  # line 14: D_k = w_t - v_k

        # Alg. 3 line 16 (Alg. 4 line 19): mean change in gradient units, (1/eta) sum_k p_k D_k
        delta_bar = {name: np.zeros_like(w_t[name]) for name in w_t}
        for i in range(len(cohort)):
            delta_bar = {name: delta_bar[name] + p[i] * changes[i][name] / eta for name in w_t}
        if local_momentum is not None:
            m_t = delta_bar  # Alg. 4 line 21
        else:
            # Alg. 3 line 17
            m_t = {name: delta_bar[name] + (beta_global - beta_local) * m_t[name] for name in w_t}
        # Alg. 3 line 19 (Alg. 4 line 23), with m_{t+1}
        w_t = {name: w_t[name] - alpha * eta * m_t[name] for name in w_t}
        history.append(w_t)
    return history
