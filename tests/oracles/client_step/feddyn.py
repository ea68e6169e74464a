"""FedDyn. Acar et al. 2021, Alg. 1.

The paper's local objective is ``f_k(v) - <h_k, v> + alpha/2 |v - w_t|^2``, h_k being its gradient of the
client's loss at the end of the client's last turn. It is followed by SGD here, not minimised exactly.
"""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, gradient
from tests.oracles.rounds import Slope, descend, minus, plus, rounds_of, weighted, zeros


def feddyn(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "uniform",
    cohorts: list[list[int]] | None = None,
    *,
    alpha: float,
    steps_done: list[dict[int, int]] | None = None,
    unused: list[set[int]] | None = None,
    lost: list[set[int]] | None = None,
    controls: list[tuple[Params, list[Params]]] | None = None,
    slope: Slope = gradient,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``, alpha > 0.

    All of ``clients`` are the population N; ``weighting`` acts in the mean of the models alone. For each
    round, ``steps_done`` has the clients whose step budget ends before their E steps, ``unused`` those
    whose reply the server drops, and ``lost`` those that have lost their h_k before it: it begins at 0
    again, and what it gave to h stays there. ``controls`` is a list that takes h and all h_k after each
    round. ``slope`` is the gradient of a batch's mean loss.
    """
    w_t = {name: value.copy() for name, value in w.items()}
    h = zeros(w)
    own = [zeros(w) for _ in clients]  # h_k
    history = []
    plan = (clients, rounds, lr, epochs, local_steps, weighting, cohorts, steps_done, unused, lost)
    for r in rounds_of(*plan):
        for k in r.lost:
            own[k] = zeros(w)
        ends, deltas = {}, {}
        for k in r.used:

            def dynamic(
                v: Params, x: np.ndarray, y: np.ndarray, h_k: Params = own[k], w_t: Params = w_t
            ) -> Params:
                g = slope(v, x, y)
                return {n: g[n] - h_k[n] + alpha * (v[n] - w_t[n]) for n in v}

            ends[k] = descend(w_t, clients[k], r.steps[k], r.eta, dynamic)
            deltas[k] = minus(ends[k], w_t)
        for k in r.used:
            own[k] = plus(own[k], -alpha, deltas[k])  # h_k <- h_k - alpha (v_k - w_t)
            h = plus(h, -alpha / len(clients), deltas[k])  # h <- h - (alpha/N) sum_S D_k
        w_t = plus(weighted(ends, r.p), -1.0 / alpha, h)  # mean v_k - h/alpha
        history.append(w_t)
        if controls is not None:
            controls.append((h, list(own)))
    return history
