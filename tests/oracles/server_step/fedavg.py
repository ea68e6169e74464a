"""FedAvg. Wang et al. 2021 (the field guide), Eq. 3 and Alg. 1; Ozfatura et al. 2021, Alg. 1."""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import rounds_of


def fedavg(w: Params, *run: Any, **how: Any) -> list[Params]:
    """Return the global model after each round."""
    models = []
    for r in rounds_of(*run, **how):
        # field-guide Alg. 1 lines 5-8: v <- w, then K_k steps of SGD; line 14 and Eq. 3: sum_k p_k v_k
        w = r.mean({k: r.descend(k, w) for k in r.used})
        models.append(w)
    return models
