"""Clip and mean, without noise. McMahan et al. 2018, Alg. 1; the methods as in their own oracles."""

import math

from tests.oracles.model import Client, Params
from tests.oracles.rounds import minus, plus, rounds_of, square, zeros


def central_dp(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: float,
    epochs: int,
    method: str,
    clip_norm: float,
    failed: frozenset[int] = frozenset(),
    *,
    alpha: float = 1.0,
    beta_local: float = 0.0,
    beta_global: float = 0.0,
) -> tuple[list[Params], int]:
    """Return (the global model after each round, how often an update was clipped).

    ``method``: "fedavg" or "fedadc", Alg. 3 red (``alpha`` and both betas). The cohort is everyone; the
    ``failed`` never answer.
    """
    m = zeros(w)  # the momentum
    models, clipped = [], 0
    for r in rounds_of(clients, rounds, lambda t: lr, epochs):
        mean = zeros(w)
        for k in set(r.cohort) - failed:
            v = w
            for x, y in r.batches(k):
                if method == "fedadc":
                    v = plus(v, -lr * beta_local / r.steps[k], m)
                v = plus(v, -lr, r.slope(v, x, y))
            norm = math.sqrt(square(minus(v, w)))
            clipped += norm > clip_norm
            # everyone who was drawn counts
            mean = plus(mean, min(1.0, clip_norm / norm) / len(clients), minus(v, w))
        step = mean
        if method == "fedadc":
            m = {n: -mean[n] / lr + (beta_global - beta_local) * m[n] for n in w}
            step = {n: -alpha * lr * m[n] for n in w}
        w = plus(w, 1.0, step)
        models.append(w)
    return models, clipped
