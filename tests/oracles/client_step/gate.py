"""VRL-SGD and FedGATE. Liang et al. 2019, Alg. 1; Haddadpour et al. 2021, Alg. 2.

FedGATE without compression: VRL-SGD with a step size of the server, after what the clients follow.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.oracles.model import Client, Params, gradient
from tests.oracles.rounds import Slope, descend, minus, plus, rounds_of, weighted, zeros


def fedgate(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "uniform",
    cohorts: list[list[int]] | None = None,
    *,
    server_lr: float,
    steps_done: list[dict[int, int]] | None = None,
    unused: list[set[int]] | None = None,
    lost: list[set[int]] | None = None,
    controls: list[list[Params]] | None = None,
    slope: Slope = gradient,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``.

    For each round, ``steps_done`` has the clients whose step budget ends before their E steps, ``unused``
    those whose reply the server drops (their d_k stays), and ``lost`` those that have lost their d_k before
    it. ``controls`` is a list that takes all d_k after each round: what a client's next turn begins with.
    ``slope`` is the gradient of a batch's mean loss.
    """
    w_t = {name: value.copy() for name, value in w.items()}
    own = [zeros(w) for _ in clients]  # d_k
    history = []
    plan = (clients, rounds, lr, epochs, local_steps, weighting, cohorts, steps_done, unused, lost)
    for r in rounds_of(*plan):
        for k in r.lost:
            own[k] = zeros(w)
        ends = {}
        for k in r.used:

            def tracked(v: Params, x: np.ndarray, y: np.ndarray, d_k: Params = own[k]) -> Params:
                return minus(slope(v, x, y), d_k)

            ends[k] = descend(w_t, clients[k], r.steps[k], r.eta, tracked)
        mean = weighted(ends, r.p)  # the next model, before the server's step size
        for k in r.used:  # d_k += (mean - v_k) / (K_k eta)
            own[k] = plus(own[k], 1.0 / (r.steps[k] * r.eta), minus(mean, ends[k]))
        w_t = plus(w_t, server_lr, minus(mean, w_t))
        history.append(w_t)
        if controls is not None:
            controls.append(list(own))
    return history


vrlsgd = partial(fedgate, server_lr=1.0)
