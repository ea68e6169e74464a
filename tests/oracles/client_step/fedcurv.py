"""FedCurv. Shoham et al. 2019, Eqs. 4-6."""

from collections.abc import Callable

import numpy as np

from tests.oracles.client_step.efl import fisher, float32
from tests.oracles.model import Client, Params, gradient


def fedcurv(
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
    implicit: bool = False,
    lost: list[set[int]] | None = None,
    float32_fisher: bool = False,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``.

    ``implicit`` divides the local gradient by 1 + 2 eta lam (U - u_k).

    ``cohorts`` are the clients whose replies are used: what others compute changes nothing. The
    clients of ``lost[t - 1]`` have lost what they kept before round t. ``float32_fisher`` rounds
    u_k, then u_k * v_k, their sums, and what is left of these without the client's own, to float32.
    """
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    rounded = float32 if float32_fisher else dict
    w_t = {name: value.copy() for name, value in w.items()}
    zero = {name: np.zeros_like(value) for name, value in w.items()}
    last: dict[int, tuple[Params, Params]] = {}  # client -> its u_k, v^_k of round t-1, if used
    history = []
    for t in range(1, rounds + 1):
        eta = lr(t)
        cohort = list(range(len(clients))) if cohorts is None else cohorts[t - 1]

        # p_k, normalised over the clients whose reply is used.
        if weighting == "num-examples":
            n = [sum(len(y) for _, y in clients[k]) for k in cohort]
            p = [n_k / sum(n) for n_k in n]
        else:
            p = [1.0 / len(cohort) for _ in cohort]

        # U = sum u_k, V = sum v^_k over the replies of round t-1
        u_sum = {name: sum((u[name] for u, _ in last.values()), zero[name]) for name in w}
        v_sum = {name: sum((v[name] for _, v in last.values()), zero[name]) for name in w}
        u_sum, v_sum = rounded(u_sum), rounded(v_sum)

        deltas = []
        now: dict[int, tuple[Params, Params]] = {}
        for k in cohort:
            batches = clients[k]
            forgot = lost is not None and k in lost[t - 1]
            u_own, v_own = (zero, zero) if forgot or k not in last else last[k]
            # a sum of squares; only rounding can make it negative
            u_rest = rounded({name: np.maximum(u_sum[name] - u_own[name], 0.0) for name in w})
            v_rest = rounded({name: v_sum[name] - v_own[name] for name in w})
            steps = epochs * len(batches) if local_steps is None else local_steps
            v = {name: value.copy() for name, value in w_t.items()}
            for step in range(steps):
                x, y = batches[step % len(batches)]
                grad = gradient(v, x, y)
                # Eq. 6: grad += 2 lam ((U - u_k) * v - (V - v^_k))
                for name in v:
                    pull = u_rest[name] * v[name] - v_rest[name]
                    grad[name] = grad[name] + 2.0 * lam * pull
                    if implicit:
                        grad[name] = grad[name] / (1.0 + 2.0 * eta * lam * u_rest[name])
                v = {name: v[name] - eta * grad[name] for name in v}
            deltas.append({name: v[name] - w_t[name] for name in v})
            u_k = fisher(v, batches)
            u_k = rounded(u_k)
            now[k] = u_k, rounded({name: u_k[name] * v[name] for name in v})

        # FedAvg's server: w <- w + sum_k p_k D_k
        delta = {name: sum(p[i] * deltas[i][name] for i in range(len(cohort))) for name in w}
        w_t = {name: w_t[name] + delta[name] for name in w}
        last = now
        history.append(w_t)
    return history
