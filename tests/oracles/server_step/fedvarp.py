"""FedVARP. Jhunjhunwala et al. 2022, Alg. 1: the last update of every client, kept by the server."""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def fedvarp(w: Params, *run: Any, weighting: str = "uniform", **how: Any) -> list[Params]:
    """Return the global model after each round.

    All clients are the population N. y_k, 0 at first, is the client's last update that was used. The
    weights act in the mean over the round's replies alone.
    """
    last: dict[int, Params] = {}  # y_k
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        common = zeros(w)  # (1/N) sum_j y_j
        for y_j in last.values():
            common = plus(common, 1.0 / len(r.clients), y_j)
        deltas = {k: minus(r.descend(k, w), w) for k in r.used}
        surprise = {k: minus(deltas[k], last.get(k, zeros(w))) for k in r.used}
        w = plus(plus(w, 1.0, r.mean(surprise)), 1.0, common)
        last |= deltas
        models.append(w)
    return models
