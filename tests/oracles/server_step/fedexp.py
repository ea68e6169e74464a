"""FedExP. Jhunjhunwala et al. 2023, Alg. 1.

``eta_g = max(1, sum |D_k|^2 / (2 M (|D|^2 + eps)))`` over the M replies, D their mean; then
``w_{t+1} = w_t + eta_g D``. With weights p_k of their own, sum_k p_k |D_k|^2 takes the place of the mean.
"""

from collections.abc import Callable

from tests.oracles.model import Client, Params, gradient
from tests.oracles.rounds import Slope, descend, minus, plus, rounds_of, square, weighted


def fedexp(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "uniform",
    cohorts: list[list[int]] | None = None,
    *,
    eps: float,
    steps_done: list[dict[int, int]] | None = None,
    unused: list[set[int]] | None = None,
    server_steps: list[float] | None = None,
    averages: list[Params] | None = None,
    slope: Slope = gradient,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``, ``eps`` >= 0.

    For each round, ``steps_done`` has the clients whose step budget ends before their E steps, ``unused``
    those whose reply the server drops. ``server_steps`` is a list that takes eta_g of each round,
    ``averages`` one that takes the mean of the last two models, which the paper evaluates. ``slope`` is the
    gradient of a batch's mean loss.
    """
    w_t = {name: value.copy() for name, value in w.items()}
    history = []
    plan = (clients, rounds, lr, epochs, local_steps, weighting, cohorts, steps_done, unused)
    for r in rounds_of(*plan):
        deltas = {}
        for k in r.used:
            deltas[k] = minus(descend(w_t, clients[k], r.steps[k], r.eta, slope), w_t)
        mean = weighted(deltas, r.p)
        spread = sum(r.p[k] * square(deltas[k]) for k in r.used)
        below = 2.0 * (square(mean) + eps)
        eta_g = 1.0 if spread <= below else spread / below  # also where both are 0
        w_next = plus(w_t, eta_g, mean)
        if averages is not None:
            averages.append({n: (w_t[n] + w_next[n]) / 2.0 for n in w_t})
        if server_steps is not None:
            server_steps.append(eta_g)
        w_t = w_next
        history.append(w_t)
    return history
