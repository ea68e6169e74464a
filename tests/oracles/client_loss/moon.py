"""MOON. Li, He, Song 2021, "Model-contrastive federated learning", Alg. 1.

The local loss is ``CE + mu l_con``, ``l_con = -log(e^{s_g/tau} / (e^{s_g/tau} + e^{s_p/tau}))``, the mean
over the batch; s_g and s_p are the cosines of z, a layer's output, with that of the global model w_t and
of the client's last local model. Those two are constants. Where a client has no last model, the loss is
CE.
"""

import math
from typing import Any

import numpy as np

from tests.oracles.model import Params, dfeatures_backprop, dlogits_backprop, features, logits
from tests.oracles.rounds import plus, rounds_of


def output(w: Params, x: np.ndarray, projection: str) -> np.ndarray:
    """Return z (B, width): the output of the layer "0" (linear), "1" (tanh) or "2" (logits)."""
    if projection == "0":
        linear: np.ndarray = x @ w["0.weight"].T + w["0.bias"]
        return linear
    return features(w, x) if projection == "1" else logits(w, x)


def backprop(w: Params, x: np.ndarray, g: np.ndarray, projection: str) -> Params:
    """Return d loss/d parameters, given ``g`` = d loss/d z (B, width)."""
    if projection == "0":
        zero = {name: np.zeros_like(value) for name, value in w.items()}
        return {**zero, "0.weight": g.T @ x, "0.bias": g.sum(axis=0)}
    return (dfeatures_backprop if projection == "1" else dlogits_backprop)(w, x, g)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of two vectors, neither of them zero."""
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def contrast(
    w: Params, w_global: Params, last: Params, x: np.ndarray, tau: float, projection: str
) -> Params:
    """Return the gradient of l_con on one batch with respect to ``w``."""
    z, z_g, z_p = (output(m, x, projection) for m in (w, w_global, last))
    g = np.zeros_like(z)
    for b in range(len(x)):
        s_g, s_p = cosine(z[b], z_g[b]), cosine(z[b], z_p[b])
        # -log(e^{s_g/tau} / (e^{s_g/tau} + e^{s_p/tau})) = log(1 + e^{(s_p - s_g)/tau})
        ratio = math.exp((s_p - s_g) / tau)
        slope = ratio / (1.0 + ratio) / tau / len(x)  # d l_con/d s_p = -d l_con/d s_g
        square = float(z[b] @ z[b])
        for other, s, sign in ((z_g[b], s_g, -1.0), (z_p[b], s_p, 1.0)):
            # d cos(z, o)/d z = o/(|z||o|) - cos z/|z|^2
            d_cosine = other / math.sqrt(square * float(other @ other)) - s * z[b] / square
            g[b] = g[b] + sign * slope * d_cosine
    return backprop(w, x, g, projection)


def moon(
    w: Params, *run: Any, mu: float = 5.0, tau: float = 0.5, projection: str = "1", **how: Any
) -> list[Params]:
    """Return the global model after each round.

    A client's last local model is the one that it last made, whether or not the server used it; with none
    (its first round, or it lost its state) it trains without l_con.
    """
    last: dict[int, Params] = {}
    models = []
    for r in rounds_of(*run, **how):
        r.forget(last)
        for k in r.trained:

            def slope(v: Params, x: np.ndarray, y: np.ndarray) -> Params:
                g = contrast(v, w, last[k], x, tau, projection) if k in last else {}
                return plus(r.slope(v, x, y), mu, g)

            last[k] = r.descend(k, w, slope)
        w = r.mean(last)
        models.append(w)
    return models
