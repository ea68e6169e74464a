"""The task's model, a perceptron with one hidden layer, in float64 with gradients by hand.

    logits = tanh(a) @ W2.T + b2,  a = x @ W1.T + b1,  loss = the batch's mean softmax cross-entropy

Parameters have the names of ``torch.nn.Sequential(Linear, Tanh, Linear)``: ``0.weight`` (h, d), ``0.bias``
(h,), ``2.weight`` (c, h) and ``2.bias`` (c,). With a BatchNorm after ``a`` they are those of ``Sequential(
Linear, BatchNorm1d, Tanh, Linear)``: ``1.weight`` and ``1.bias`` are added, ``2.*`` become ``3.*``, and the
buffers are ``1.running_mean`` and ``1.running_var`` (h,).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Params: TypeAlias = dict[str, Array]
Batch: TypeAlias = tuple[Array, NDArray[np.int64]]
"""Inputs (B, d) and labels (B,)."""
EPS, MOMENTUM = 1e-5, 0.1
"""Of BatchNorm, as in torch."""
BUFFERS = ("1.running_mean", "1.running_var")


def initial(d: int, hidden: int, classes: int, seed: int, batch_norm: bool = False) -> Params:
    """Return parameters, and buffers: uniform within 1/sqrt(inputs of the layer), BatchNorm as in torch."""
    rng, last = np.random.default_rng(seed), 3 if batch_norm else 2
    w: Params = {}
    for layer, (rows, columns) in ((0, (hidden, d)), (last, (classes, hidden))):
        bound = columns**-0.5
        w[f"{layer}.weight"] = rng.uniform(-bound, bound, (rows, columns))
        w[f"{layer}.bias"] = rng.uniform(-bound, bound, rows)
    if batch_norm:
        w |= {"1.weight": np.ones(hidden), "1.bias": np.zeros(hidden)}
        w |= {BUFFERS[0]: np.zeros(hidden), BUFFERS[1]: np.ones(hidden)}
    return w


def accuracy(w: Params, x: Array, y: NDArray[np.int64]) -> float:
    """Return the share of inputs whose largest logit is their label's; NaN if a logit is not finite."""
    a = x @ w["0.weight"].T + w["0.bias"]
    if "1.weight" in w:
        a = (a - w[BUFFERS[0]]) / np.sqrt(w[BUFFERS[1]] + EPS) * w["1.weight"] + w["1.bias"]
    last = 3 if "1.weight" in w else 2
    z = np.tanh(a) @ w[f"{last}.weight"].T + w[f"{last}.bias"]
    return float((z.argmax(axis=1) == y).mean()) if np.isfinite(z).all() else float("nan")


def gradient(w: Params, batch: Batch) -> tuple[Params, Params]:
    """Return the gradient of the batch's loss, by parameter, and the buffers after the batch."""
    x, y = batch
    a, size = x @ w["0.weight"].T + w["0.bias"], len(y)
    normal, after = _normalised(a, w), {}
    if "1.weight" in w:
        after = _buffers(a, w)
        b = normal[0] * w["1.weight"] + w["1.bias"]
    else:
        b = a
    last = 3 if "1.weight" in w else 2
    hidden = np.tanh(b)
    z = hidden @ w[f"{last}.weight"].T + w[f"{last}.bias"]
    z = np.exp(z - z.max(axis=1, keepdims=True))
    g = z / z.sum(axis=1, keepdims=True)  # softmax - onehot
    g[np.arange(size), y] -= 1.0
    g /= size
    grads = {f"{last}.weight": g.T @ hidden, f"{last}.bias": g.sum(axis=0)}
    d = (g @ w[f"{last}.weight"]) * (1.0 - hidden**2)  # d loss / d b
    if "1.weight" in w:
        unit, scale = normal
        grads |= {"1.weight": (d * unit).sum(axis=0), "1.bias": d.sum(axis=0)}
        d = d * w["1.weight"]  # through the batch's mean and variance
        d = (d - d.mean(axis=0) - unit * (d * unit).mean(axis=0)) / scale
    return grads | {"0.weight": d.T @ x, "0.bias": d.sum(axis=0)}, after


def _normalised(a: Array, w: Params) -> tuple[Array, Array]:
    """Return ``a`` with mean 0 and variance 1 over the batch, and the standard deviation."""
    scale = np.sqrt(a.var(axis=0) + EPS)
    return (a - a.mean(axis=0)) / scale, scale


def _buffers(a: Array, w: Params) -> Params:
    """Return the running statistics after a batch; the variance is the unbiased one, as in torch."""
    n = len(a)
    now = {BUFFERS[0]: a.mean(axis=0), BUFFERS[1]: a.var(axis=0) * n / max(n - 1, 1)}
    return {name: (1 - MOMENTUM) * w[name] + MOMENTUM * now[name] for name in BUFFERS}


def plus(a: Params, factor: float, b: Params) -> Params:
    """Return a + factor b, where b has an entry; a elsewhere."""
    return {name: a[name] + factor * b[name] if name in b else a[name] for name in a}


def minus(a: Params, b: Params) -> Params:
    """Return a - b, over the entries of b."""
    return {name: a[name] - b[name] for name in b}


def square(a: Params) -> float:
    """Return the squared norm, all arrays as one vector."""
    return float(sum((value**2).sum() for value in a.values()))


def softmax(z: Array) -> Array:
    """Return the softmax of each row."""
    powers = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def outputs(w: Params, x: Array) -> tuple[Array, Array]:
    """Return the hidden layer (B, h) and the logits (B, c), without BatchNorm."""
    hidden = np.tanh(x @ w["0.weight"].T + w["0.bias"])
    return hidden, hidden @ w["2.weight"].T + w["2.bias"]


def backward(w: Params, x: Array, g: Array, *, features: bool = False) -> Params:
    """Return the parameters' gradient, given the loss's for the logits, or for the hidden layer."""
    hidden, _ = outputs(w, x)
    last = {"2.weight": np.zeros_like(w["2.weight"]), "2.bias": np.zeros_like(w["2.bias"])}
    if not features:
        last = {"2.weight": g.T @ hidden, "2.bias": g.sum(axis=0)}
        g = g @ w["2.weight"]
    d = g * (1.0 - hidden**2)
    return {"0.weight": d.T @ x, "0.bias": d.sum(axis=0), **last}


def loss(w: Params, batch: Batch) -> float:
    """Return the batch's mean cross-entropy, without BatchNorm."""
    x, y = batch
    return float(-np.log(softmax(outputs(w, x)[1])[np.arange(len(y)), y]).mean())
