"""FedDecorr. Shi et al. 2023, Eq. 4, in the form of the authors' code.

``CE + beta (1/B) mean_{i != j} C_ij^2`` with ``C = x_hat' x_hat`` over a batch of B inputs of the output
layer: each of the d features centred, and divided by sqrt(1e-8 + its unbiased variance). 0 if B or d is 1.
"""

import math
from typing import Any

import numpy as np

from tests.oracles.model import Params, dfeatures_backprop, features, gradient
from tests.oracles.rounds import Slope, plus
from tests.oracles.server_step.fedavg import fedavg


def decorrelation(w: Params, x: np.ndarray) -> Params:
    """Return the gradient of the term on one batch, without beta, with respect to ``w``."""
    phi = features(w, x)
    size, width = phi.shape
    g = np.zeros_like(phi)
    if size == 1 or width == 1:
        return dfeatures_backprop(w, x, g)
    centred, scale = np.zeros_like(phi), np.zeros(width)
    for j in range(width):
        centred[:, j] = phi[:, j] - sum(phi[:, j]) / size
        scale[j] = math.sqrt(1e-8 + sum(centred[:, j] ** 2) / (size - 1))
    hat = centred / scale
    d_hat = np.zeros_like(phi)
    pairs = width * (width - 1)
    for i in range(width):
        for j in range(width):
            if i != j:
                c_ij = float(hat[:, i] @ hat[:, j])
                d_hat[:, i] += 2.0 * c_ij * hat[:, j] / pairs / size
                d_hat[:, j] += 2.0 * c_ij * hat[:, i] / pairs / size
    for j in range(width):
        # hat = centred / s, and d s/d centred = centred / ((B - 1) s)
        d_scale = -float(d_hat[:, j] @ centred[:, j]) / scale[j] ** 2
        d_centred = d_hat[:, j] / scale[j] + d_scale * centred[:, j] / ((size - 1) * scale[j])
        g[:, j] = d_centred - sum(d_centred) / size
    return dfeatures_backprop(w, x, g)


def feddecorr(
    w: Params,
    *run: Any,
    beta: float = 0.1,
    slope: Slope = gradient,
    weighting: str = "uniform",
    **how: Any,
) -> list[Params]:
    """Return the global model after each round: FedAvg's on the changed loss."""

    def changed(v: Params, x: np.ndarray, y: np.ndarray) -> Params:
        return plus(slope(v, x, y), beta, decorrelation(v, x))

    return fedavg(w, *run, slope=changed, weighting=weighting, **how)
