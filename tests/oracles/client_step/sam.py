"""FedSAM and FedLESAM, alone and with FedCM, SCAFFOLD and FedDyn.

Qu et al. 2022, Alg. 1 (FedSAM, MoFedSAM); Dai et al. 2023 (FedGAMMA); Fan et al. 2024, Alg. 1 (FedLESAM,
-S, -D). All take each gradient at ``v + rho d/|d|`` on the same batch: d is that batch's gradient at v in
FedSAM, and ``w_old - w_t`` in FedLESAM. Where d is 0 or missing the gradient is taken at v.
"""

from typing import Any

from tests.oracles.client_step.fedcm import fedcm
from tests.oracles.client_step.scaffold import scaffold
from tests.oracles.model import Params, gradient
from tests.oracles.rounds import Slope, minus, plus, rounds_of, square, zeros
from tests.oracles.server_step.fedavg import fedavg


def ahead(v: Params, rho: float, d: Params) -> Params:
    """Return v + rho d/|d|, all arrays as one vector; v where d is 0."""
    length = square(d) ** 0.5
    return v if length == 0.0 else plus(v, rho / length, d)


def fedlesam(
    w: Params, *run: Any, rho: float, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round, ``rho`` >= 0.

    Each client of the cohort receives the model, and keeps it until its next turn, whether its reply is
    used or not.
    """
    last: dict[int, Params] = {}  # client -> w_old
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        r.forget(last)
        ends = {}
        for k in r.used:
            d = minus(last.get(k, w), w)
            ends[k] = r.descend(k, w, lambda v, *at: r.slope(ahead(v, rho, d), *at))
        last |= dict.fromkeys(r.trained, w)
        w = r.mean(ends)
        models.append(w)
    return models


def sharp(slope: Slope, rho: float) -> Slope:
    """Return the gradient at ``v + rho grad f/|grad f|``, with grad f at v."""
    return lambda v, x, y: slope(ahead(v, rho, slope(v, x, y)), x, y)


def fedsam(
    w: Params,
    *run: Any,
    rho: float,
    slope: Slope = gradient,
    weighting: str = "uniform",
    **how: Any,
) -> list[Params]:
    """Return the global model after each round, ``rho`` >= 0: FedAvg's at further gradients."""
    return fedavg(w, *run, slope=sharp(slope, rho), weighting=weighting, **how)


def mofedsam(
    w: Params, *run: Any, alpha: float, rho: float, slope: Slope = gradient, **how: Any
) -> list[Params]:
    """Return the global model after each round: FedCM's, whose gradients are FedSAM's."""
    return fedcm(w, *run, alpha=alpha, slope=sharp(slope, rho), **how)


def fedgamma(w: Params, *run: Any, rho: float, slope: Slope = gradient, **how: Any) -> list[Params]:
    """Return the global model after each round: SCAFFOLD's of option 2, whose gradients are FedSAM's."""
    return scaffold(w, *run, slope=sharp(slope, rho), **how)


def fedlesam_s(
    w: Params, *run: Any, rho: float, server_lr: float = 1.0, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round: SCAFFOLD (option 2) at FedLESAM's points.

    w_old is kept in any case, c_k if the reply was used. A client that has lost both starts from nothing.
    """
    c, last = zeros(w), dict[int, Params]()
    own: dict[int, Params] = {}  # c_k
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        r.forget(last, own)
        ends, risen = {}, c
        for k in r.used:
            d, c_k = minus(last.get(k, w), w), own.get(k, zeros(w))
            pull = minus(c, c_k)
            v = r.descend(k, w, lambda v, *at: plus(r.slope(ahead(v, rho, d), *at), 1.0, pull))
            ends[k] = v
            own[k] = plus(minus(c_k, c), 1.0 / (r.steps[k] * r.eta), minus(w, v))
            risen = plus(risen, 1.0 / len(r.clients), minus(own[k], c_k))
        last |= dict.fromkeys(r.trained, w)
        w, c = plus(w, server_lr, minus(r.mean(ends), w)), risen
        models.append(w)
    return models


def fedlesam_d(
    w: Params, *run: Any, rho: float, alpha: float, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round: FedDyn at FedLESAM's points.

    The pull ``alpha (v - w_t)`` is taken at v. w_old is kept in any case, h_k if the reply was used.
    """
    h, last = zeros(w), dict[int, Params]()
    own: dict[int, Params] = {}  # h_k
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        r.forget(last, own)
        ends = {}
        for k in r.used:
            d, h_k = minus(last.get(k, w), w), own.get(k, zeros(w))

            def slope(v: Params, *at: Any) -> Params:
                return plus(minus(r.slope(ahead(v, rho, d), *at), h_k), alpha, minus(v, w))

            ends[k] = v = r.descend(k, w, slope)
            own[k] = plus(h_k, -alpha, minus(v, w))
            h = plus(h, -alpha / len(r.clients), minus(v, w))
        last |= dict.fromkeys(r.trained, w)
        w = plus(r.mean(ends), -1.0 / alpha, h)
        models.append(w)
    return models
