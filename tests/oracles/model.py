"""The oracles' model: a two-layer perceptron in float64 with hand-written backpropagation.

    logits = tanh(x @ W1.T + b1) @ W2.T + b2,    loss = batch mean of the softmax cross-entropy

The parameter names are those of ``torch.nn.Sequential(Linear, Tanh, Linear)``:
``0.weight`` (h, d), ``0.bias`` (h,), ``2.weight`` (c, h), ``2.bias`` (c,).
"""

import numpy as np

Params = dict[str, np.ndarray]
Batch = tuple[np.ndarray, np.ndarray]
"""Inputs (B, d) and integer labels (B,)."""
Client = list[Batch]


def logits(w: Params, x: np.ndarray) -> np.ndarray:
    """Return the logits (B, c) of the inputs ``x`` (B, d)."""
    hidden = np.tanh(x @ w["0.weight"].T + w["0.bias"])
    z: np.ndarray = hidden @ w["2.weight"].T + w["2.bias"]
    return z


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Return log softmax(z) row by row; the row maximum is subtracted first against overflow."""
    shifted = z - z.max(axis=1, keepdims=True)
    log_p: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_p


def loss(w: Params, x: np.ndarray, y: np.ndarray) -> float:
    """Return the mean over the batch of -log softmax(logits)_y."""
    log_p = log_softmax(logits(w, x))
    total = 0.0
    for b in range(len(y)):
        total -= log_p[b, y[b]]
    return float(total / len(y))


def dlogits_backprop(w: Params, x: np.ndarray, g: np.ndarray) -> Params:
    """Return d loss/d parameters, given ``g`` = d loss/d logits (B, c)."""
    hidden = np.tanh(x @ w["0.weight"].T + w["0.bias"])  # (B, h)
    # logits = hidden W2' + b2
    d_weight2 = g.T @ hidden  # (c, h)
    d_bias2 = g.sum(axis=0)  # (c,)
    d_hidden = g @ w["2.weight"]  # (B, h)
    # hidden = tanh(a), d tanh(a)/da = 1 - tanh(a)^2
    d_a = d_hidden * (1.0 - hidden**2)  # (B, h)
    # a = x W1' + b1
    d_weight1 = d_a.T @ x  # (h, d)
    d_bias1 = d_a.sum(axis=0)  # (h,)
    return {"0.weight": d_weight1, "0.bias": d_bias1, "2.weight": d_weight2, "2.bias": d_bias2}


def gradient(w: Params, x: np.ndarray, y: np.ndarray) -> Params:
    """Return the gradient of :func:`loss` with respect to every parameter."""
    g = np.exp(log_softmax(logits(w, x)))  # d(-log p_y)/d logits = p - onehot(y)
    for b in range(len(y)):
        g[b, y[b]] -= 1.0
    g = g / len(y)  # mean over the batch
    return dlogits_backprop(w, x, g)


def features(w: Params, x: np.ndarray) -> np.ndarray:
    """Return phi (B, h), the input of the output layer, of the inputs ``x`` (B, d)."""
    phi: np.ndarray = np.tanh(x @ w["0.weight"].T + w["0.bias"])
    return phi


def dfeatures_backprop(w: Params, x: np.ndarray, g: np.ndarray) -> Params:
    """Return d loss/d parameters, given ``g`` = d loss/d phi (B, h) of a loss on phi alone.

    The output layer has no part in phi: its gradient is zero.
    """
    phi = features(w, x)
    d_a = g * (1.0 - phi**2)  # phi = tanh(a), d tanh(a)/da = 1 - tanh(a)^2
    # a = x W1' + b1
    return {
        "0.weight": d_a.T @ x,
        "0.bias": d_a.sum(axis=0),
        "2.weight": np.zeros_like(w["2.weight"]),
        "2.bias": np.zeros_like(w["2.bias"]),
    }
