"""FedDecorr. Shi et al. 2023, Eq. 4, in the form of the authors' code.

``CE + beta (1/B) mean_{i != j} C_ij^2`` with ``C = x_hat' x_hat`` over a batch of B inputs of the output
layer: each of the d features centred, and divided by sqrt(1e-8 + its unbiased variance). 0 if B or d is 1.
"""

import math
from typing import Any

import numpy as np

from tests.oracles.model import Params, dfeatures_backprop, features
from tests.oracles.rounds import plus, rounds_of


def decorrelation(w: Params, x: np.ndarray) -> tuple[float, Params]:
    """Return the term on one batch, without beta, and its gradient with respect to ``w``."""
    phi = features(w, x)
    size, width = phi.shape
    g = np.zeros_like(phi)
    if size == 1 or width == 1:
        return 0.0, dfeatures_backprop(w, x, g)
    centred, scale = np.zeros_like(phi), np.zeros(width)
    for j in range(width):
        centred[:, j] = phi[:, j] - sum(phi[:, j]) / size
        scale[j] = math.sqrt(1e-8 + sum(centred[:, j] ** 2) / (size - 1))
    hat = centred / scale
    value, d_hat = 0.0, np.zeros_like(phi)
    pairs = width * (width - 1)
    for i in range(width):
        for j in range(width):
            if i != j:
                c_ij = float(hat[:, i] @ hat[:, j])
                value += c_ij**2 / pairs / size
                d_hat[:, i] += 2.0 * c_ij * hat[:, j] / pairs / size
                d_hat[:, j] += 2.0 * c_ij * hat[:, i] / pairs / size
    for j in range(width):
        # hat = centred / s, and d s/d centred = centred / ((B - 1) s)
        d_scale = -float(d_hat[:, j] @ centred[:, j]) / scale[j] ** 2
        d_centred = d_hat[:, j] / scale[j] + d_scale * centred[:, j] / ((size - 1) * scale[j])
        g[:, j] = d_centred - sum(d_centred) / size
    return value, dfeatures_backprop(w, x, g)


def feddecorr(
    w: Params, *run: Any, beta: float = 0.1, weighting: str = "uniform", **how: Any
) -> list[Params]:
    """Return the global model after each round."""
    models = []
    for r in rounds_of(*run, weighting=weighting, **how):
        ends = {}
        for k in r.used:
            v = w
            for x, y in r.batches(k):
                v = plus(v, -r.eta, plus(r.slope(v, x, y), beta, decorrelation(v, x)[1]))
            ends[k] = v
        w = r.mean(ends)
        models.append(w)
    return models
