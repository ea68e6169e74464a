"""FedSAM and FedLESAM. Qu et al. 2022, Alg. 1; Fan et al. 2024, Alg. 1.

Both take each gradient at ``v + rho d/|d|`` on the same batch: d is that batch's gradient at v in FedSAM,
and ``w_old - w_t`` in FedLESAM. Where d is 0 or missing the gradient is taken at v.
"""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, gradient
from tests.oracles.rounds import Slope, descend, minus, plus, rounds_of, square, weighted


def ahead(v: Params, rho: float, d: Params) -> Params:
    """Return v + rho d/|d|, all arrays as one vector; v where d is 0."""
    length = square(d) ** 0.5
    return v if length == 0.0 else plus(v, rho / length, d)


def fedsam(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "uniform",
    cohorts: list[list[int]] | None = None,
    *,
    rho: float,
    mu: float = 0.0,
    steps_done: list[dict[int, int]] | None = None,
    unused: list[set[int]] | None = None,
    slope: Slope = gradient,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``, ``rho`` >= 0.

    ``mu`` is FedProx's, whose penalty is a part of the local loss. For each round, ``steps_done`` has the
    clients whose step budget ends before their E steps, ``unused`` those whose reply the server drops.
    ``slope`` is the gradient of a batch's mean loss.
    """
    w_t = {name: value.copy() for name, value in w.items()}
    history = []
    plan = (clients, rounds, lr, epochs, local_steps, weighting, cohorts, steps_done, unused)
    for r in rounds_of(*plan):

        def local(v: Params, x: np.ndarray, y: np.ndarray, w_t: Params = w_t) -> Params:
            return plus(slope(v, x, y), mu, minus(v, w_t))

        def sharp(v: Params, x: np.ndarray, y: np.ndarray, local: Slope = local) -> Params:
            return local(ahead(v, rho, local(v, x, y)), x, y)

        ends = {k: descend(w_t, clients[k], r.steps[k], r.eta, sharp) for k in r.used}
        w_t = weighted(ends, r.p)
        history.append(w_t)
    return history


def fedlesam(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "uniform",
    cohorts: list[list[int]] | None = None,
    *,
    rho: float,
    mu: float = 0.0,
    steps_done: list[dict[int, int]] | None = None,
    unused: list[set[int]] | None = None,
    lost: list[set[int]] | None = None,
    slope: Slope = gradient,
) -> list[Params]:
    """Return the global model after each round; arguments as in :func:`fedsam`.

    Each client of ``cohorts`` receives the model, and keeps it until its next turn, whether its reply is
    used or not. ``lost`` has for each round the clients that have lost what they kept before it.
    """
    w_t = {name: value.copy() for name, value in w.items()}
    last: dict[int, Params] = {}  # client -> w_old
    history = []
    plan = (clients, rounds, lr, epochs, local_steps, weighting, cohorts, steps_done, unused, lost)
    for r in rounds_of(*plan):
        for k in r.lost:
            last.pop(k, None)
        ends = {}
        for k in r.used:
            d = minus(last.get(k, w_t), w_t)

            def local(v: Params, x: np.ndarray, y: np.ndarray, w_t: Params = w_t) -> Params:
                return plus(slope(v, x, y), mu, minus(v, w_t))

            def sharp(
                v: Params, x: np.ndarray, y: np.ndarray, d: Params = d, local: Slope = local
            ) -> Params:
                return local(ahead(v, rho, d), x, y)

            ends[k] = descend(w_t, clients[k], r.steps[k], r.eta, sharp)
        for k in r.cohort:
            last[k] = w_t
        w_t = weighted(ends, r.p)
        history.append(w_t)
    return history
