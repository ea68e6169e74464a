"""FedBABU. Oh, Kim, Yun 2022, Alg. 1.

The paper is "FedBABU: toward enhanced representation for federated image classification". Clients train the
body alone: the output layer stays the initial model's. At evaluation, a client fine-tunes the global model.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.oracles.averaged import Turn, averaged, sgd
from tests.oracles.model import Batch, Client, Params, gradient

HEAD = ("2.weight", "2.bias")
"""The parameters of the output layer."""


def part_of(part: str) -> Callable[..., Params]:
    """Return the gradient of the loss on "all", the "head" or the "body"; elsewhere it is zero."""
    if part not in ("all", "head", "body"):
        raise ValueError(part)

    def slope(w: Params, x: np.ndarray, y: np.ndarray) -> Params:
        g = gradient(w, x, y)
        for name in g:
            if part != "all" and (name in HEAD) != (part == "head"):
                g[name] = np.zeros_like(g[name])
        return g

    return slope


def fine_tuned(w: Params, data: Client, eta: float, part: str = "all", epochs: int = 5) -> Params:
    """Return a client's personal model: ``epochs`` passes over its data from the global model."""
    batches: list[Batch] = data * epochs
    return sgd(w, batches, eta, slope=part_of(part))


def fedbabu(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    *args: Any,
    personal_part: str = "all",
    personal_epochs: int = 5,
    personal_lr: float | None = None,
    personal: list[dict[int, Params]] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round; the other arguments as in ``rounds.averaged``.

    Its output layer is ``w``'s, always. ``personal`` is a list that takes what each client makes of the
    global model after each round, with ``personal_lr`` (None: that round's).
    """

    def local(turn: Turn) -> Params:
        return sgd(turn.w, turn.batches, turn.eta, slope=part_of("body"))

    def after(new: Params, _used: dict[int, Params]) -> None:
        if personal is None:
            return
        eta = lr(len(personal) + 1) if personal_lr is None else personal_lr
        own = [fine_tuned(new, data, eta, personal_part, personal_epochs) for data in clients]
        personal.append(dict(enumerate(own)))

    return averaged(local, w, clients, rounds, lr, *args, after=after, **how)
