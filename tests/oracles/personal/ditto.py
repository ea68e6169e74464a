"""Ditto. Li, Hu, Beirami, Smith 2021, Alg. 1, beside FedAvg or FedProx.

The paper is "Ditto: fair and robust federated learning through personalization".
"""

from collections.abc import Callable
from typing import Any

from tests.oracles.averaged import Turn, averaged, sgd
from tests.oracles.model import Batch, Client, Params


def pulled(u: Params, w: Params, batches: list[Batch], eta: float, lam: float) -> Params:
    """Return ``u`` after ``u -= eta (grad F_k(u) + lam (u - w))`` on each batch, w held still."""
    return sgd(u, batches, eta, lambda u, _: {name: lam * (u[name] - w[name]) for name in u})


def ditto(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    *args: Any,
    lam: float = 0.1,
    personal_lr: float | None = None,
    mu: float = 0.0,
    personal: list[dict[int, Params]] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round; the other arguments as in ``rounds.averaged``.

    u_k starts at the w_t of the client's first round, or of the first after it was lost, and is kept
    whether or not the server used the reply. It takes the global model's batches, as many steps, with
    ``personal_lr`` (None: the round's). ``personal`` is a list that takes all clients' u_k after each
    round. With ``mu``, the global model is FedProx's.
    """
    own: dict[int, Params] = {}

    def local(turn: Turn) -> Params:
        eta = turn.eta if personal_lr is None else personal_lr
        own[turn.k] = pulled(own.get(turn.k, turn.w), turn.w, turn.batches, eta, lam)
        return pulled(turn.w, turn.w, turn.batches, turn.eta, mu)

    def after(_w: Params, _used: dict[int, Params]) -> None:
        if personal is not None:
            personal.append(dict(own))

    return averaged(
        local, w, clients, rounds, lr, *args,
        forget=lambda k: own.pop(k, None), after=after, **how,
    )  # fmt: skip
