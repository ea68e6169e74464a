"""Ditto. Li, Hu, Beirami, Smith 2021, Alg. 1, beside FedAvg or FedProx.

The paper is "Ditto: fair and robust federated learning through personalization".
"""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import Round, minus, plus, rounds_of


def pulled(r: Round, k: int, u: Params, w: Params, eta: float, lam: float) -> Params:
    """Return ``u`` after ``u -= eta (grad F_k(u) + lam (u - w))`` on each batch, w held still."""
    for x, y in r.batches(k):
        u = plus(u, -eta, plus(r.slope(u, x, y), lam, minus(u, w)))
    return u


def ditto(
    w: Params,
    *run: Any,
    lam: float = 0.1,
    personal_lr: float | None = None,
    mu: float = 0.0,
    personal: list[dict[int, Params]] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round.

    u_k starts at the w_t of the client's first round, or of the first after it was lost, and is kept
    whether or not the server used the reply. It takes the global model's batches, as many steps, with
    ``personal_lr`` (None: the round's). ``personal`` is a list that takes all clients' u_k after each
    round. With ``mu``, the global model is FedProx's.
    """
    own: dict[int, Params] = {}
    models = []
    for r in rounds_of(*run, **how):
        for k in r.lost:
            own.pop(k, None)
        for k in r.trained:
            own[k] = pulled(r, k, own.get(k, w), w, personal_lr or r.eta, lam)
        w = r.mean({k: pulled(r, k, w, w, r.eta, mu) for k in r.used})
        models.append(w)
        if personal is not None:
            personal.append(dict(own))
    return models
