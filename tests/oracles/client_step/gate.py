"""VRL-SGD and FedGATE. Liang et al. 2019, Alg. 1; Haddadpour et al. 2021, Alg. 2.

FedGATE without compression: VRL-SGD with a step size of the server, after what the clients follow.
"""

from functools import partial
from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def fedgate(
    w: Params, *run: Any, server_lr: float, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round.

    A client that has lost its d_k begins at 0; one whose reply is dropped keeps its own.
    """
    own: dict[int, Params] = {}  # d_k
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        own = {k: zeros(w) if k in r.lost or r.t == 1 else own[k] for k in range(len(r.clients))}
        ends = {}
        for k in r.used:
            ends[k] = r.descend(k, w, lambda *at: minus(r.slope(*at), own[k]))
        mean = r.mean(ends)  # the next model, before the server's step size
        for k in r.used:  # d_k += (mean - v_k) / (K_k eta)
            own[k] = plus(own[k], 1.0 / (r.steps[k] * r.eta), minus(mean, ends[k]))
        w = plus(w, server_lr, minus(mean, w))
        models.append(w)
    return models


vrlsgd = partial(fedgate, server_lr=1.0)
