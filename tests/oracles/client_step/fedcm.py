"""FedCM. Xu et al. 2021, Alg. 2.

``v -= eta (alpha grad f + (1 - alpha) D_t)``, D_t the last global step as a gradient of one local step.
"""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, gradient
from tests.oracles.rounds import Slope, descend, minus, rounds_of, weighted, zeros


def fedcm(
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
    first_round: str = "fedavg",
    divisor: str = "budget",
    steps_done: list[dict[int, int]] | None = None,
    unused: list[set[int]] | None = None,
    slope: Slope = gradient,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``, 0 < alpha <= 1.

    Round 1 has no last step: it is FedAvg's, or with ``first_round="paper"`` D_1 is 0, so that alpha
    shrinks it. For each round, ``steps_done`` has the clients whose step budget ends before their E steps,
    ``unused`` those whose reply the server drops. K_k in D_t is the budget, where there is one, or with
    ``divisor="planned"`` always E. ``slope`` is the gradient of a batch's mean loss.
    """
    if first_round not in ("fedavg", "paper") or divisor not in ("budget", "planned"):
        raise ValueError(f"{first_round}, {divisor}")
    w_t = {name: value.copy() for name, value in w.items()}
    step: Params | None = None  # (w_{t-1} - w_t)/eta, the eta of round t-1
    history = []
    plan = (clients, rounds, lr, epochs, local_steps, weighting, cohorts, steps_done, unused)
    for r in rounds_of(*plan):
        ends = {}
        for k in r.used:
            total = zeros(w) if step is None else step
            length = r.planned[k] if divisor == "planned" else r.steps[k]  # K_k
            share = 1.0 if step is None and first_round == "fedavg" else alpha
            ahead = {n: (1.0 - share) * total[n] / length for n in w}

            def mixed(
                v: Params, x: np.ndarray, y: np.ndarray, share: float = share, ahead: Params = ahead
            ) -> Params:
                g = slope(v, x, y)
                return {n: share * g[n] + ahead[n] for n in v}

            ends[k] = descend(w_t, clients[k], r.steps[k], r.eta, mixed)
        w_next = weighted(ends, r.p)
        step = {n: a / r.eta for n, a in minus(w_t, w_next).items()}
        w_t = w_next
        history.append(w_t)
    return history
