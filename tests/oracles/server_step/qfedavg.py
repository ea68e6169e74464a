"""q-FedAvg. Li et al. 2020, Alg. 2, with L = 1/eta.

``Dw_k = L (w_t - v_k)``, ``D_k = F_k^q Dw_k``, ``h_k = q F_k^(q-1) |Dw_k|^2 + L F_k^q``, and the server
takes ``w_{t+1} = w_t - sum D_k / sum h_k``, with F_k the client's mean loss at w_t.
"""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, gradient, loss
from tests.oracles.rounds import Slope, descend, examples, minus, plus, rounds_of, square, zeros


def qfedavg(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "uniform",
    cohorts: list[list[int]] | None = None,
    *,
    q: float,
    steps_done: list[dict[int, int]] | None = None,
    unused: list[set[int]] | None = None,
    losses: list[dict[int, float]] | None = None,
    slope: Slope = gradient,
    height: Callable[[Params, np.ndarray, np.ndarray], float] = loss,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``, ``q`` >= 0.

    ``weighting`` plays no part. For each round, ``steps_done`` has the clients whose step budget ends
    before their E steps, ``unused`` those whose reply the server drops. ``losses`` is a list that takes
    F_k of each round's replies. ``slope`` and ``height`` are the gradient of a batch's mean loss, and this
    loss.
    """
    w_t = {name: value.copy() for name, value in w.items()}
    history = []
    plan = (clients, rounds, lr, epochs, local_steps, weighting, cohorts, steps_done, unused)
    for r in rounds_of(*plan):
        lipschitz = 1.0 / r.eta  # L
        above, below = zeros(w), 0.0
        seen = {}
        for k in r.used:
            f = 0.0  # F_k, over all examples
            for x, y in clients[k]:
                f += len(y) / examples(clients[k]) * height(w_t, x, y)
            seen[k] = f
            if q < 1.0:
                f = max(f, 1e-12)
            v = descend(w_t, clients[k], r.steps[k], r.eta, slope)
            dw = {n: lipschitz * a for n, a in minus(w_t, v).items()}
            above = plus(above, f**q, dw)
            below += q * f ** (q - 1.0) * square(dw) + lipschitz * f**q
        w_t = plus(w_t, -1.0 / below, above)
        history.append(w_t)
        if losses is not None:
            losses.append(seen)
    return history
