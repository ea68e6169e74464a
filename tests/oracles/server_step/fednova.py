"""FedNova. Wang et al. 2020, Sec. 4 ("normalized averaging").

A client's change is ``-eta G_k a_k``: its gradients in the columns of G_k, times what each counts in the
end. The server takes ``tau_eff = sum p_k |a_k|_1`` times the mean of the changes over |a_k|_1.
"""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


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
    w: Params, *run: Any, momentum: float = 0.0, mu: float = 0.0, **how: Any
) -> list[Params]:
    """Return the global model after each round.

    Clients have heavy-ball SGD with ``momentum`` rho, fresh each round, or FedProx's ``mu`` (eta mu < 1);
    not both.
    """
    models = []
    for r in rounds_of(*run, **how):
        normalised, a = {}, {}
        for k in r.used:
            v, buffer = w, zeros(w)
            for x, y in r.batches(k):
                g = plus(r.slope(v, x, y), mu, minus(v, w))
                buffer = plus(g, momentum, buffer)
                v = plus(v, -r.eta, buffer)
            a[k] = sum(map(abs, counts(r.steps[k], momentum, mu, r.eta)))
            normalised[k] = {n: d / a[k] for n, d in minus(v, w).items()}  # -eta d_k
        w = plus(w, sum(r.p[k] * a[k] for k in r.used), r.mean(normalised))
        models.append(w)
    return models
