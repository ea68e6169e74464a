"""Mime and MimeLite. Karimireddy et al. 2021, the boxes of both, base SGDm.

The server's statistics are the momentum m, which starts at 0 and stays as it is during a round:
``v -= eta ((1 - beta) g + beta m)``, then ``m <- (1 - beta) c + beta m`` once, on the server.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.oracles.model import Client, Params, gradient
from tests.oracles.rounds import (
    Slope,
    descend,
    mean_gradient,
    plus,
    rounds_of,
    weighted,
    weights_of,
    zeros,
)


def mime(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "uniform",
    cohorts: list[list[int]] | None = None,
    *,
    beta: float,
    lite: bool = False,
    c_weighting: str | None = None,
    steps_done: list[dict[int, int]] | None = None,
    unused: list[set[int]] | None = None,
    controls: list[tuple[Params, Params]] | None = None,
    slope: Slope = gradient,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``, 0 <= beta < 1.

    For each round, ``steps_done`` has the clients whose step budget ends before their E steps, ``unused``
    those whose reply the server drops. In Mime their full gradient has come before, and counts in c, in
    the first exchange; a client that falls out before that is not in ``cohorts``. ``lite`` is MimeLite:
    the full gradient comes with the reply. c's weights are p_k over the clients that it is made of, or
    follow ``c_weighting``. ``controls`` is a list that takes c and m after each round. ``slope`` is the
    gradient of a batch's mean loss.
    """
    w_t = {name: value.copy() for name, value in w.items()}
    m = zeros(w)
    history = []
    plan = (clients, rounds, lr, epochs, local_steps, weighting, cohorts, steps_done, unused)
    for r in rounds_of(*plan):
        asked = r.used if lite else r.cohort
        full = {k: mean_gradient(w_t, clients[k], slope) for k in asked}
        # c = (1/|S|) sum of the full gradients at the server's model
        c = weighted(full, weights_of(clients, asked, c_weighting or weighting))
        ends = {}
        for k in r.used:

            def force(
                v: Params,
                x: np.ndarray,
                y: np.ndarray,
                w_t: Params = w_t,
                c: Params = c,
                m: Params = m,
            ) -> Params:
                g = slope(v, x, y)
                if not lite:  # SVRG's correction: - grad f(w_t; zeta) + c
                    at_w = slope(w_t, x, y)
                    g = {n: g[n] - at_w[n] + c[n] for n in v}
                return {n: (1.0 - beta) * g[n] + beta * m[n] for n in v}

            ends[k] = descend(w_t, clients[k], r.steps[k], r.eta, force)
        w_t = weighted(ends, r.p)
        m = plus({n: beta * m[n] for n in m}, 1.0 - beta, c)
        history.append(w_t)
        if controls is not None:
            controls.append((c, m))
    return history


mimelite = partial(mime, lite=True)
