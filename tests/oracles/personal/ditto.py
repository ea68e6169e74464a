"""Ditto. Li, Hu, Beirami, Smith 2021, Alg. 1, beside FedAvg.

The paper is "Ditto: fair and robust federated learning through personalization".
"""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of


def ditto(
    w: Params,
    *run: Any,
    lam: float = 0.1,
    personal_lr: float | None = None,
    personal: list[dict[int, Params]] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round.

    u_k starts at the w_t of the client's first round, or of the first after it was lost, and is kept
    whether or not the server used the reply. It takes the global model's batches, as many steps, with
    ``personal_lr`` (None: the round's). ``personal`` is a list that takes all clients' u_k after each
    round.
    """
    own: dict[int, Params] = {}
    models = []
    for r in rounds_of(*run, **how):
        r.forget(own)
        for k in r.trained:
            u = own.get(k, w)
            for x, y in r.batches(k):  # u -= eta (grad F_k(u) + lam (u - w)), w held still
                u = plus(u, -(personal_lr or r.eta), plus(r.slope(u, x, y), lam, minus(u, w)))
            own[k] = u
        w = r.mean({k: r.descend(k, w) for k in r.used})
        models.append(w)
        if personal is not None:
            personal.append(dict(own))
    return models
