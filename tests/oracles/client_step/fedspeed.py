"""FedSpeed. Sun et al. 2023, Alg. 1; FedSMOO. Sun et al. 2023, Alg. 1.

Both have FedDyn's two sums in units of the model: ``h_k += v_k - w_t`` on the client, kept if the reply was
used, and ``h += (1/N) sum_S (v_k - w_t)`` on the server, the mean of all h_k. A local step is::

    v -= eta ((1 - alpha) grad f(v) + alpha grad f(v + s_hat) + lam (v - w_t + h_k))

and the server takes ``w = mean v_k + h``, h with this round's part.
"""

from typing import Any

from tests.oracles.client_step.sam import ahead
from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def scaled(d: Params, rho: float) -> Params:
    """Return rho d/|d|, all arrays as one vector; 0 where d is 0."""
    return ahead(zeros(d), rho, d)


def fedspeed(
    w: Params,
    *run: Any,
    lam: float,
    rho: float,
    alpha: float = 1.0,
    weighting: str = "uniform",
    **how: Any,
) -> list[Params]:
    """Return the global model after each round; s_hat is rho grad f(v)/|grad f(v)|.

    All clients are the population N. A client that has lost its h_k begins at 0; its part stays in h.
    """
    h, own = zeros(w), dict[int, Params]()
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        r.forget(own)
        ends = {}
        for k in r.used:
            h_k = own.get(k, zeros(w))

            def slope(v: Params, *at: Any) -> Params:
                plain = r.slope(v, *at)
                further = r.slope(plus(v, 1.0, scaled(plain, rho)), *at)
                pull = plus(minus(v, w), 1.0, h_k)
                return {n: (1 - alpha) * plain[n] + alpha * further[n] + lam * pull[n] for n in v}

            ends[k] = v = r.descend(k, w, slope)
            own[k] = plus(h_k, 1.0, minus(v, w))
            h = plus(h, 1.0 / len(r.clients), minus(v, w))
        w = plus(r.mean(ends), 1.0, h)
        models.append(w)
    return models


def fedsmoo(
    w: Params, *run: Any, lam: float, rho: float, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round: FedSpeed's (alpha 1) with a common perturbation s.

    In a step, ``s_hat = rho d/|d|`` with ``d = grad f(v) - mu_k - s``, then ``mu_k += s_hat - s``. mu_k is
    kept, like h_k, if the reply was used. The server takes ``s = rho m/|m|``, m the plain sum of the used
    mu_k, which gives the same s as their plain mean.
    """
    h, s = zeros(w), zeros(w)
    own: dict[int, tuple[Params, Params]] = {}  # h_k, mu_k
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        r.forget(own)
        ends, duals = {}, {}
        for k in r.used:
            v = w
            h_k, mu = own.get(k, (zeros(w), zeros(w)))
            for x, y in r.batches(k):
                s_hat = scaled(minus(minus(r.slope(v, x, y), mu), s), rho)
                mu = plus(mu, 1.0, minus(s_hat, s))
                pull = plus(minus(v, w), 1.0, h_k)
                v = plus(v, -r.eta, plus(r.slope(plus(v, 1.0, s_hat), x, y), lam, pull))
            ends[k], duals[k] = v, mu
            own[k] = plus(h_k, 1.0, minus(v, w)), mu
            h = plus(h, 1.0 / len(r.clients), minus(v, w))
        w = plus(r.mean(ends), 1.0, h)
        total = zeros(w)
        for mu in duals.values():
            total = plus(total, 1.0, mu)
        s = scaled(total, rho)
        models.append(w)
    return models
