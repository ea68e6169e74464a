"""FedProx. Li et al. 2020, Alg. 2; Tian et al. 2022, Eq. 8."""

from collections.abc import Callable

from tests.oracles.model import Client, Params, gradient


def fedprox(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "num-examples",
    cohorts: list[list[int]] | None = None,
    *,
    mu: float,
    implicit: bool = False,
) -> list[Params]:
    """Return the global model after each round; arguments as in ``fedavg``, ``mu`` >= 0.

    ``implicit`` divides the local gradient by 1 + eta mu.
    """
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    w_t = {name: value.copy() for name, value in w.items()}
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
            v = {name: value.copy() for name, value in w_t.items()}
            for step in range(steps):
                x, y = batches[step % len(batches)]
                grad = gradient(v, x, y)
                # f_k(v) + mu/2 |v - w_t|^2, so grad += mu (v - w_t)
                grad = {name: grad[name] + mu * (v[name] - w_t[name]) for name in v}
                if implicit:
                    grad = {name: grad[name] / (1.0 + eta * mu) for name in v}
                v = {name: v[name] - eta * grad[name] for name in v}
            deltas.append({name: v[name] - w_t[name] for name in v})

        # FedAvg's server: w <- w + sum_k p_k D_k
        delta = {name: sum(p[i] * deltas[i][name] for i in range(len(cohort))) for name in w_t}
        w_t = {name: w_t[name] + delta[name] for name in w_t}
        history.append(w_t)
    return history
