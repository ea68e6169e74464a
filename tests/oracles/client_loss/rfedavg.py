"""rFedAvg and rFedAvg+. Wang, Tong et al. 2023, Eqs. 2-5, Alg. 1 and Alg. 2.

The regulariser acts on phi = tanh(x W1' + b1), the input of the output layer. On each batch it
takes phi_bar, the batch mean of phi; the deltas it is compared with are constants.
"""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, dfeatures_backprop, features, gradient


def delta(w: Params, batches: Client) -> np.ndarray:
    """Return delta (h,), the mean of phi over all examples of ``batches`` (not of batch means)."""
    total = np.zeros(len(w["0.bias"]))
    examples = 0
    for x, _ in batches:
        phi = features(w, x)
        for b in range(len(x)):
            total = total + phi[b]
            examples += 1
    return total / examples  # Alg. 1 line 10, Alg. 2 line 15: (1/n_k) sum_j phi(w, x_kj)


def distance(w: Params, x: np.ndarray, target: np.ndarray) -> float:
    """Return ||phi_bar - target||^2 on one batch."""
    phi_bar = features(w, x).mean(axis=0)
    return float(((phi_bar - target) ** 2).sum())  # Eq. 2, squared as in Eq. 5


def distance_gradient(w: Params, x: np.ndarray, target: np.ndarray) -> Params:
    """Return the gradient of :func:`distance` with respect to every parameter."""
    phi = features(w, x)
    d_phi_bar = 2.0 * (phi.mean(axis=0) - target)  # d ||phi_bar - target||^2/d phi_bar
    g = np.zeros_like(phi)
    for b in range(len(x)):
        g[b] = d_phi_bar / len(x)  # phi_bar = (1/B) sum_b phi_b
    return dfeatures_backprop(w, x, g)


def rfedavg(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "num-examples",
    cohorts: list[list[int]] | None = None,
    *,
    lam: float,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``.

    A client is compared with every other client seen in an earlier round, in this round's cohort
    or not; where there is none (round 1, for one), it trains without the term.
    """
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    w_t = {name: value.copy() for name, value in w.items()}
    table: dict[int, np.ndarray] = {}  # Alg. 1 line 1; empty until a client replies
    history = []
    for t in range(1, rounds + 1):  # line 2
        eta = lr(t)
        cohort = list(range(len(clients))) if cohorts is None else cohorts[t - 1]

        # Aggregation weights p_k, normalised over the cohort.
        if weighting == "num-examples":
            n = [sum(len(y) for _, y in clients[k]) for k in cohort]
            p = [n_k / sum(n) for n_k in n]
        else:
            p = [1.0 / len(cohort) for _ in cohort]

        received = dict(table)  # line 3: the table as it is at the start of the round
        models = []
        replies: dict[int, np.ndarray] = {}
        for k in cohort:  # line 4
            batches = clients[k]
            steps = epochs * len(batches) if local_steps is None else local_steps  # K_k
            v = {name: value.copy() for name, value in w_t.items()}  # line 5
            others = [j for j in received if j != k]  # N - 1 of them
            for step in range(steps):  # line 6
                x, y = batches[step % len(batches)]  # line 8
                grad = gradient(v, x, y)
                # Eqs. 3 and 5: + lam r_k, r_k = 1/(N-1) sum_{j != k} ||phi_bar - delta^j||^2
                for j in others:
                    d_distance = distance_gradient(v, x, received[j])
                    grad = {name: grad[name] + lam / len(others) * d_distance[name] for name in v}
                v = {name: v[name] - eta * grad[name] for name in v}  # line 9
            models.append(v)  # line 11
            # lines 10 and 11, with the final local model v_k
            replies[k] = delta(v, batches)

        # line 12: w <- sum_k p_k v_k
        w_t = {name: np.zeros_like(value) for name, value in w_t.items()}
        for i in range(len(cohort)):
            w_t = {name: w_t[name] + p[i] * models[i][name] for name in w_t}
        for k in cohort:  # line 13; a client outside the cohort keeps its last delta
            table[k] = replies[k]
        history.append(w_t)
    return history


def rfedavg_plus(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "num-examples",
    cohorts: list[list[int]] | None = None,
    *,
    lam: float,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``.

    A client is compared with the unweighted mean of the deltas of the others in this round's
    cohort, all taken with w_t, from round 1 on; alone in its cohort, it trains without the term.
    Alg. 2 takes them at the end of the round before, with the same model.
    """
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    w_t = {name: value.copy() for name, value in w.items()}
    history = []
    for t in range(1, rounds + 1):  # Alg. 2 line 3
        eta = lr(t)
        cohort = list(range(len(clients))) if cohorts is None else cohorts[t - 1]

        # Aggregation weights p_k, normalised over the cohort.
        if weighting == "num-examples":
            n = [sum(len(y) for _, y in clients[k]) for k in cohort]
            p = [n_k / sum(n) for n_k in n]
        else:
            p = [1.0 / len(cohort) for _ in cohort]

        deltas: dict[int, np.ndarray] = {}
        for k in cohort:  # line 14 (line 13 sent w_t)
            deltas[k] = delta(w_t, clients[k])  # lines 15 and 16

        models = []
        for k in cohort:  # line 5
            # lines 17, 18 and 4: 1/(N-1) sum_{j != k} delta^j over the cohort
            others = [deltas[j] for j in cohort if j != k]
            mean_of_others = np.zeros(len(w["0.bias"]))
            for other in others:
                mean_of_others = mean_of_others + other / len(others)

            batches = clients[k]
            steps = epochs * len(batches) if local_steps is None else local_steps  # K_k
            v = {name: value.copy() for name, value in w_t.items()}  # line 6
            for step in range(steps):  # line 7
                x, y = batches[step % len(batches)]  # line 9
                grad = gradient(v, x, y)
                if others:
                    # Eq. 3 and Sec. IV-C: + lam ||phi_bar - mean of the others||^2
                    d_distance = distance_gradient(v, x, mean_of_others)
                    grad = {name: grad[name] + lam * d_distance[name] for name in v}
                v = {name: v[name] - eta * grad[name] for name in v}  # line 10
            models.append(v)  # line 11

        # line 12: w <- sum_k p_k v_k
        w_t = {name: np.zeros_like(value) for name, value in w_t.items()}
        for i in range(len(cohort)):
            w_t = {name: w_t[name] + p[i] * models[i][name] for name in w_t}
        history.append(w_t)
    return history
