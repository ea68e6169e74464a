"""FedNova. Wang et al. 2020, Sec. 4 ("normalized averaging").

A client's change is ``-eta G_k a_k``: its gradients in the columns of G_k, times what each counts in the
end. The server takes ``tau_eff = sum p_k |a_k|_1`` times the mean of the changes over |a_k|_1.
"""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, gradient
from tests.oracles.rounds import Slope, minus, plus, rounds_of, weighted, zeros


def counts(steps: int, momentum: float, mu: float, eta: float) -> list[float]:
    """Return a_k: how often each step's gradient is in ``(w_t - v_k) / eta``."""
    a = []
    for first in range(steps):
        # A gradient of 1 in this step and of 0 in the others: where that leaves v.
        buffer, moved = 0.0, 0.0
        for step in range(steps):
            g = float(step == first) + mu * -moved * eta  # v - w_t = -eta moved
            buffer = momentum * buffer + g
            moved += buffer
        a.append(moved)
    return a


def fednova(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "num-examples",
    cohorts: list[list[int]] | None = None,
    *,
    momentum: float = 0.0,
    mu: float = 0.0,
    steps_done: list[dict[int, int]] | None = None,
    unused: list[set[int]] | None = None,
    slope: Slope = gradient,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``.

    Clients have heavy-ball SGD with ``momentum`` rho, fresh each round, or FedProx's ``mu`` (eta mu < 1);
    not both. For each round, ``steps_done`` has the clients whose step budget ends before their E steps,
    ``unused`` those whose reply the server drops. ``slope`` is the gradient of a batch's mean loss.
    """
    if momentum and mu:
        raise ValueError("momentum or mu, not both")
    w_t = {name: value.copy() for name, value in w.items()}
    history = []
    plan = (clients, rounds, lr, epochs, local_steps, weighting, cohorts, steps_done, unused)
    for r in rounds_of(*plan):
        if r.eta * mu >= 1.0:
            raise ValueError(f"round {r.t}: eta mu is {r.eta * mu}")
        normalised, a = {}, {}
        for k in r.used:
            v, buffer = w_t, zeros(w)
            for step in range(r.steps[k]):
                g = slope(v, *clients[k][step % len(clients[k])])
                g = {n: g[n] + mu * (v[n] - w_t[n]) for n in v}
                buffer = {n: momentum * buffer[n] + g[n] for n in v}
                v = plus(v, -r.eta, buffer)
            a[k] = float(np.sum(np.abs(counts(r.steps[k], momentum, mu, r.eta))))
            delta = minus(v, w_t)
            normalised[k] = {n: delta[n] / a[k] for n in delta}  # -eta d_k
        tau_eff = sum(r.p[k] * a[k] for k in r.used)
        w_t = plus(w_t, tau_eff, weighted(normalised, r.p))
        history.append(w_t)
    return history
