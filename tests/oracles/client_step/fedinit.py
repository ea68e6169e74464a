"""FedInit. Sun, Shen, Tao 2023, Alg. 1."""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of


def fedinit(
    w: Params, *run: Any, beta: float, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round, ``beta`` >= 0.

    A client starts at ``w_t + beta (w_t - v_k)``, v_k its last local model, used or not; else at w_t.
    """
    last: dict[int, Params] = {}  # client -> v_k
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        r.forget(last)
        for k in r.trained:
            last[k] = r.descend(k, plus(w, beta, minus(w, last.get(k, w))))
        w = r.mean(last)
        models.append(w)
    return models
