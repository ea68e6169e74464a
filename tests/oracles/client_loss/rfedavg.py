"""rFedAvg and rFedAvg+. Wang, Tong et al. 2023, Eqs. 2-5, Alg. 1 and Alg. 2.

The regulariser acts on phi = tanh(x W1' + b1), the input of the output layer. On each batch it
takes phi_bar, the batch mean of phi; the deltas it is compared with are constants.
"""

from typing import Any

import numpy as np

from tests.oracles.model import Client, Params, dfeatures_backprop, features
from tests.oracles.rounds import plus, rounds_of


def delta(w: Params, batches: Client) -> np.ndarray:
    """Return delta (h,), the mean of phi over all examples of ``batches`` (not of batch means)."""
    # Alg. 1 line 10, Alg. 2 line 15: (1/n_k) sum_j phi(w, x_kj)
    mean: np.ndarray = features(w, np.concatenate([x for x, _ in batches])).mean(axis=0)
    return mean


def distance_gradient(w: Params, x: np.ndarray, target: np.ndarray) -> Params:
    """Return the gradient of ``||phi_bar - target||^2`` on one batch (Eq. 2, squared as in Eq. 5)."""
    phi = features(w, x)
    d_phi_bar = 2.0 * (phi.mean(axis=0) - target)  # d ||phi_bar - target||^2/d phi_bar
    g = np.zeros_like(phi)
    for b in range(len(x)):
        g[b] = d_phi_bar / len(x)  # phi_bar = (1/B) sum_b phi_b
    return dfeatures_backprop(w, x, g)


def rfedavg(w: Params, *run: Any, lam: float, **how: Any) -> list[Params]:
    """Return the global model after each round.

    A client is compared with every other client seen in an earlier round, in this round's cohort
    or not; where there is none (round 1, for one), it trains without the term.
    """
    table: dict[int, np.ndarray] = {}  # Alg. 1 line 1; empty until a client replies
    models = []
    for r in rounds_of(*run, **how):  # line 2
        ends = {}
        for k in r.used:  # line 4
            v = w  # line 5
            others = [delta_j for j, delta_j in table.items() if j != k]  # N - 1 of them
            for x, y in r.batches(k):  # lines 6, 8
                grad = r.slope(v, x, y)
                # Eqs. 3 and 5: + lam r_k, r_k = 1/(N-1) sum_{j != k} ||phi_bar - delta^j||^2
                for delta_j in others:
                    grad = plus(grad, lam / len(others), distance_gradient(v, x, delta_j))
                v = plus(v, -r.eta, grad)  # line 9
            ends[k] = v  # line 11
        # lines 10, 11 and 13, with the final local model v_k; who is not in the cohort keeps its last
        table |= {k: delta(v, r.clients[k]) for k, v in ends.items()}
        w = r.mean(ends)  # line 12
        models.append(w)
    return models


def rfedavg_plus(w: Params, *run: Any, lam: float, **how: Any) -> list[Params]:
    """Return the global model after each round.

    A client is compared with the unweighted mean of the deltas of the others in this round's
    cohort, all taken with w_t, from round 1 on; alone in its cohort, it trains without the term.
    Alg. 2 takes them at the end of the round before, with the same model.
    """
    models = []
    for r in rounds_of(*run, **how):  # Alg. 2 line 3
        deltas = {k: delta(w, r.clients[k]) for k in r.cohort}  # lines 13-16
        ends = {}
        for k in r.used:  # line 5
            # lines 17, 18 and 4: 1/(N-1) sum_{j != k} delta^j over the cohort
            others = [deltas[j] for j in r.cohort if j != k]

            def slope(v: Params, x: np.ndarray, y: np.ndarray) -> Params:
                # Eq. 3 and Sec. IV-C: + lam ||phi_bar - mean of the others||^2
                pull = distance_gradient(v, x, np.mean(others, axis=0)) if others else {}
                return plus(r.slope(v, x, y), lam, pull)

            ends[k] = r.descend(k, w, slope)  # lines 6-11
        w = r.mean(ends)  # line 12
        models.append(w)
    return models
