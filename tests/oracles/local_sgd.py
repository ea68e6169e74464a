"""FedProx on clients with heavy-ball SGD, weight decay and clipping; torch's documented SGD, in loops.

A step of torch.optim.SGD with momentum m and weight decay d is ``b = m b + (g + d v)``, ``v = v - lr b``,
with b zero at the start of the round. ``torch.nn.utils.clip_grad_norm_`` first multiplies g by
``min(1, c / (|g| + 1e-6))``, where |g| is over all parameters. g is the gradient of the local objective.
"""

import math

import numpy as np

from tests.oracles.model import Client, Params, gradient


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
    history, clipped = [], 0
    for _ in range(rounds):
        total = {name: np.zeros_like(value) for name, value in w.items()}
        for client in clients:
            v = {name: value.copy() for name, value in w.items()}
            b = {name: np.zeros_like(value) for name, value in w.items()}
            for _ in range(epochs):
                for x, y in client:
                    g = gradient(v, x, y)
                    g = {name: g[name] + mu * (v[name] - w[name]) for name in g}
                    length = math.sqrt(sum(float((a**2).sum()) for a in g.values()))
                    factor = min(1.0, norm / (length + 1e-6))
                    clipped += factor < 1.0
                    for name in v:
                        b[name] = momentum * b[name] + factor * g[name] + decay * v[name]
                        v[name] = v[name] - lr * b[name]
            for name in total:
                total[name] += (v[name] - w[name]) / len(clients)
        w = {name: w[name] + total[name] for name in w}
        history.append(w)
    return history, clipped
