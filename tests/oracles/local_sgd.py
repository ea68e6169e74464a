"""FedProx on clients with heavy-ball SGD, weight decay and clipping; torch's documented SGD, in loops.

A step of torch.optim.SGD with momentum m and weight decay d is ``b = m b + (g + d v)``, ``v = v - lr b``,
with b zero at the start of the round. ``torch.nn.utils.clip_grad_norm_`` first multiplies g by
``min(1, c / (|g| + 1e-6))``, where |g| is over all parameters. g is the gradient of the local objective.
"""

import math

from tests.oracles.model import Client, Params
from tests.oracles.rounds import minus, plus, rounds_of, square, zeros


def local_sgd(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: float,
    epochs: int,
    *,
    mu: float = 0.0,
    momentum: float = 0.0,
    decay: float = 0.0,
    norm: float = math.inf,
) -> tuple[list[Params], int]:
    """Return the global model after each round (uniform weights), and in how many steps it clipped."""
    models, clipped = [], 0
    for r in rounds_of(clients, rounds, lambda t: lr, epochs, weighting="uniform"):
        ends = {}
        for k in r.used:
            v, b = w, zeros(w)
            for x, y in r.batches(k):
                g = plus(r.slope(v, x, y), mu, minus(v, w))
                factor = min(1.0, norm / (math.sqrt(square(g)) + 1e-6))
                clipped += factor < 1.0
                b = {n: momentum * b[n] + factor * g[n] + decay * v[n] for n in v}
                v = plus(v, -lr, b)
            ends[k] = v
        w = r.mean(ends)
        models.append(w)
    return models, clipped
