"""EFL. Ma et al. 2021, Alg. 1-2, Eqs. 2-6 and Sec. 4.2.

Where the paper's boxes differ from its text: ST picks by |T| (Alg. 2 thresholds T), and the
server moves by ST(D), what it sends (Alg. 1 and Eq. 6 move by D and keep the residual of it too).
"""

import math
from typing import Any

import numpy as np

from tests.oracles.model import Client, Params, gradient
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def fisher(w: Params, batches: Client) -> Params:
    """Return the diagonal of the empirical Fisher at ``w`` over all samples of ``batches``.

    The mean over the samples of the squared gradient of that sample's own log-likelihood.
    """
    total, samples = zeros(w), sum(len(y) for _, y in batches)
    for x, y in batches:
        for b in range(len(y)):
            # A batch of one: its loss is -log p(y_b | x_b), and the sign is lost in the square.
            grad = gradient(w, x[b : b + 1], y[b : b + 1])
            total = plus(total, 1.0 / samples, {name: grad[name] ** 2 for name in grad})
    return total


def compress(tensors: Params, q: float | None) -> Params:
    """Return ST of ``tensors`` (Alg. 2), all of them as one vector; unchanged where q is None."""
    if q is None:
        return tensors
    flat = np.concatenate([value.ravel() for value in tensors.values()])  # T, in dict order
    n = len(flat)
    k = max(math.floor(n * q + 1e-9), 1)  # k = max(nq, 1); 100 * 0.29 is below 29 in floating point
    # top_k and mask: the k largest |T|, of equal ones the one with the lower index first
    kept = sorted(range(n), key=lambda i: (-abs(flat[i]), i))[:k]
    mu = sum(abs(flat[i]) for i in kept) / k  # mu = (1/k) sum_i |T_i^mask|
    ternary = np.zeros(n)
    for i in kept:
        ternary[i] = mu * np.sign(flat[i])  # T^ = mu sign(T^mask)
    parts = np.split(ternary, np.cumsum([value.size for value in tensors.values()])[:-1])
    return {n: a.reshape(tensors[n].shape) for n, a in zip(tensors, parts, strict=True)}


def float32(tensors: Params) -> Params:
    """Return ``tensors`` rounded to the nearest float32, held in float64."""
    return {name: value.astype(np.float32).astype(np.float64) for name, value in tensors.items()}


def half(tensors: Params) -> Params:
    """Return ``tensors`` in 16 bits: float16 times one float32 number for all of them."""
    top = max(float(np.abs(value).max()) for value in tensors.values())
    scale = max(np.float32(top) / np.float32(65504), np.float32(2.0**-126))
    return {
        name: (value.astype(np.float32) / scale).astype(np.float16).astype(np.float32) * scale
        for name, value in tensors.items()
    }


def only_largest(u: Params, v: Params, q: float) -> tuple[Params, Params]:
    """Return ``u`` and ``v`` at the fraction q of entries with largest u, by name; 0 elsewhere."""
    entries = [(name, i) for name in sorted(u) for i in np.ndindex(u[name].shape)]
    kept = sorted(entries, key=lambda entry: -u[entry[0]][entry[1]])  # stable: the first of equals
    u_kept, v_kept = zeros(u), zeros(v)
    for name, i in kept[: max(math.floor(len(entries) * q + 1e-9), 1)]:
        u_kept[name][i] = u[name][i]
        v_kept[name][i] = v[name][i]
    return u_kept, v_kept


def as_sent(u: Params, v: Params, bits: int | None, density: float | None) -> tuple[Params, Params]:
    """Return u and v, in float32, as the other end gets them."""
    if density is not None:
        u, v = only_largest(u, v, density)
    return (half(u), half(v)) if bits == 16 else (u, v)


def efl(
    w: Params,
    *run: Any,
    lam: float,
    implicit: bool = False,
    density_up: float | None = None,
    density_down: float | None = None,
    sums_bits: int | None = None,
    sums_every: int = 1,
    sums_density: float | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round.

    ``implicit`` divides the local gradient by 1 + eta lam U. ``density_up`` and ``density_down`` are q of
    ST at the clients and at the server; None sends as it is and keeps no residual. u_k, then u_k * v_k, and
    then their sums, are rounded to float32. They travel in ``sums_bits`` (16: see ``half``), at the
    fraction ``sums_density`` of entries with largest u_k or U, and only every ``sums_every`` rounds: in the
    others, every client uses the last sums.
    """
    residual, residuals = zeros(w), dict[int, Params]()  # Alg. 1, initialize: R^G, R^k <- 0
    sums = zeros(w), zeros(w)  # (U, V); none in round 1
    models = []
    for r in rounds_of(*run, **how):  # Alg. 1: for each round
        delta, u_sum, v_sum = zeros(w), zeros(w), zeros(w)
        r.forget(residuals)
        for k in r.trained:  # Alg. 1, ClientUpdate
            v = w
            for x, y in r.batches(k):  # for j = 0, ..., s_k - 1
                # Eq. 3: + lam/2 v'Uv - lam v'V, so grad += lam (U * v - V)
                pull = {n: sums[0][n] * v[n] - sums[1][n] for n in v}
                grad = plus(r.slope(v, x, y), lam, pull)
                if implicit:
                    grad = {n: grad[n] / (1.0 + r.eta * lam * sums[0][n]) for n in v}
                v = plus(v, -r.eta, grad)  # Eq. 4
            total = plus(minus(v, w), 1.0, residuals.get(k, zeros(w)))  # D_k = R_k + v_k - w_t
            change = compress(total, density_up)
            if density_up is not None:  # Eq. 5, kept until the client's next turn
                residuals[k] = minus(total, change) if k in r.used else total
            if k not in r.used:
                continue
            # Sec. 4.2: D = R^G + sum_k p_k^tau ST(D_k), p_k^tau = E p_k / s_k, not normalised again
            delta = plus(delta, r.p[k] * r.planned[k] / r.steps[k], change)
            # u_k = diag(I_k), v^_k = diag(I_k) v_k, at v_k itself, before any compression
            u_k = float32(fisher(v, r.clients[k]))
            v_k = float32({n: u_k[n] * v[n] for n in v})
            u_k, v_k = as_sent(u_k, v_k, sums_bits, sums_density)
            u_sum, v_sum = plus(u_sum, 1.0, u_k), plus(v_sum, 1.0, v_k)
        if density_down is not None:
            total = plus(delta, 1.0, residual)
            delta = compress(total, density_down)
            residual = minus(total, delta)  # R = D - ST(D)
        w = plus(w, 1.0, delta)  # w <- w + ST(D)
        models.append(w)
        if (r.t - 1) % sums_every == 0:
            # U = sum_k u_k and V = sum_k v^_k over this round's replies, for the next round
            sums = as_sent(float32(u_sum), float32(v_sum), sums_bits, sums_density)
    return models
