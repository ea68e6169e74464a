"""FedBABU. Oh, Kim, Yun 2022, Alg. 1.

The paper is "FedBABU: toward enhanced representation for federated image classification". Clients train the
body alone: the output layer stays the initial model's. At evaluation, a client fine-tunes the global model.
"""

from typing import Any

from tests.oracles.model import Batch, Client, Params, gradient
from tests.oracles.rounds import plus, rounds_of

HEAD = ("2.weight", "2.bias")
"""The parameters of the output layer."""


def descended(w: Params, batches: list[Batch], eta: float, part: str) -> Params:
    """Return ``w`` after a step of SGD on each batch of "all" parameters, the "head" or the "body"."""
    for x, y in batches:
        g = gradient(w, x, y)
        trained = {n: a for n, a in g.items() if part == "all" or (n in HEAD) == (part == "head")}
        w = plus(w, -eta, trained)
    return w


def fine_tuned(w: Params, data: Client, eta: float, part: str = "all", epochs: int = 5) -> Params:
    """Return a client's personal model: ``epochs`` passes over its data from the global model."""
    return descended(w, data * epochs, eta, part)


def fedbabu(
    w: Params,
    *run: Any,
    personal_part: str = "all",
    personal_epochs: int = 5,
    personal_lr: float | None = None,
    personal: list[dict[int, Params]] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round; its output layer is ``w``'s, always.

    ``personal`` is a list that takes what each client makes of the global model after each round, with
    ``personal_lr`` (None: that round's).
    """
    models = []
    for r in rounds_of(*run, **how):
        w = r.mean({k: descended(w, r.batches(k), r.eta, "body") for k in r.used})
        models.append(w)
        if personal is not None:
            eta = personal_lr or r.eta
            own = [fine_tuned(w, c, eta, personal_part, personal_epochs) for c in r.clients]
            personal.append(dict(enumerate(own)))
    return models
