"""FedAvg. Wang et al. 2021 (the field guide), Eq. 3 and Alg. 1; Ozfatura et al. 2021, Alg. 1."""

from collections.abc import Callable

from tests.oracles.model import Client, Params, gradient


def fedavg(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "num-examples",
    cohorts: list[list[int]] | None = None,
) -> list[Params]:
    """Return the global model after each round.

    A client passes ``epochs`` times over its batches in order, or takes ``local_steps`` batches,
    cycling through them from the first. ``lr(t)`` is the client learning rate of round t (from 1).
    ``cohorts[t - 1]`` lists the clients of round t (default: all of them in every round).
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
            v = {name: value.copy() for name, value in w_t.items()}  # field-guide Alg. 1 line 5
            for step in range(steps):  # line 6
                x, y = batches[step % len(batches)]
                grad = gradient(v, x, y)  # line 7
                v = {name: v[name] - eta * grad[name] for name in v}  # line 8, ClientOpt = SGD
            deltas.append({name: v[name] - w_t[name] for name in v})  # line 11: D_k = v_k - w_t

        # line 14: D = sum_k p_k D_k;  Eq. 3 (line 15 with ServerOpt = SGD of lr 1): w <- w + D
        delta = {name: sum(p[i] * deltas[i][name] for i in range(len(cohort))) for name in w_t}
        w_t = {name: w_t[name] + delta[name] for name in w_t}
        history.append(w_t)
    return history
