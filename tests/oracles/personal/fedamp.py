"""FedAMP. Huang et al. 2021, Alg. 1.

The paper is "Personalized cross-silo federated learning on non-IID data". With v_k client k's model,
``u_k = (1 - sum_{j != k} xi_kj) v_k + sum_{j != k} xi_kj v_j``, ``xi_kj = alpha A'(|v_k - v_j|^2)``,
``A'(x) = e^{-x/sigma}/sigma``. A client starts at u_k and trains ``f_k(v) + lam/(2 alpha) |v - u_k|^2``.

The paper has all clients in every round. Here v_k is the last model of client k that the server used, and
all clients that have one, in this round's cohort or not, are in the sums. A client that has none starts at
the global model, u_k = w_t: in round 1 that is the formula's u_k too, as all are at w_1. The global model,
which the paper does not have, is the mean of the v_k of a round.
"""

import math
from collections.abc import Callable
from typing import Any

from tests.oracles.averaged import Turn, averaged, sgd
from tests.oracles.model import Client, Params


def clouds(own: dict[int, Params], alpha: float, sigma: float) -> dict[int, Params]:
    """Return every client's cloud model u_k, given its v_k."""
    made = {}
    for k, v in own.items():
        others = [j for j in own if j != k]
        xi = {}
        for j in others:
            square = sum(float(((v[name] - own[j][name]) ** 2).sum()) for name in v)
            xi[j] = alpha * math.exp(-square / sigma) / sigma
        u = {name: (1.0 - sum(xi.values())) * v[name] for name in v}
        for j in others:
            u = {name: u[name] + xi[j] * own[j][name] for name in v}
        made[k] = u
    return made


def fedamp(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    *args: Any,
    lam: float,
    alpha: float,
    sigma: float,
    personal: list[dict[int, Params]] | None = None,
    sent: list[dict[int, Params]] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the mean of the clients' models after each round; other arguments: ``rounds.averaged``.

    After each round, ``personal`` takes all clients' last v_k, whether or not the server used the reply,
    and ``sent`` all cloud models u_k as the next round sends them. Training needs no state of the clients,
    so that ``lost`` changes nothing.
    """
    seen: dict[int, Params] = {}
    made: dict[int, Params] = {}
    u_next: dict[int, Params] = {}

    def local(turn: Turn) -> Params:
        u = u_next.get(turn.k, turn.w)

        def pull(v: Params, _: Any) -> Params:
            return {name: lam / alpha * (v[name] - u[name]) for name in v}

        made[turn.k] = sgd(u, turn.batches, turn.eta, pull)
        return made[turn.k]

    def after(_w: Params, used: dict[int, Params]) -> None:
        seen.update(used)
        u_next.update(clouds(seen, alpha, sigma))
        if personal is not None:
            personal.append(dict(made))
        if sent is not None:
            sent.append(dict(u_next))

    return averaged(local, w, clients, rounds, lr, *args, after=after, **how)
