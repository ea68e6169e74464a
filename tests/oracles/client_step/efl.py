"""EFL. Ma et al. 2021, Alg. 1-2, Eqs. 2-6 and Sec. 4.2.

Where the paper's boxes differ from its text: ST picks by |T| (Alg. 2 thresholds T), and the
server moves by ST(D), what it sends (Alg. 1 and Eq. 6 move by D and keep the residual of it too).
"""

import math
from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, gradient


def fisher(w: Params, batches: Client) -> Params:
    """Return the diagonal of the empirical Fisher at ``w`` over all samples of ``batches``.

    The mean over the samples of the squared gradient of that sample's own log-likelihood.
    """
    total = {name: np.zeros_like(value) for name, value in w.items()}
    samples = 0
    for x, y in batches:
        for b in range(len(y)):
            # A batch of one: its loss is -log p(y_b | x_b), and the sign is lost in the square.
            grad = gradient(w, x[b : b + 1], y[b : b + 1])
            total = {name: total[name] + grad[name] ** 2 for name in total}
            samples += 1
    return {name: total[name] / samples for name in total}


def compress(tensors: Params, q: float | None) -> Params:
    """Return ST of ``tensors`` (Alg. 2), all of them as one vector; unchanged where q is None."""
    if q is None:
        return tensors
    if not 0.0 < q <= 1.0:
        raise ValueError(q)
    flat = np.concatenate([value.ravel() for value in tensors.values()])  # T, in dict order
    n = len(flat)
    k = max(math.floor(n * q + 1e-9), 1)  # k = max(nq, 1); 100 * 0.29 is below 29 in floating point
    # top_k and mask: the k largest |T|, of equal ones the one with the lower index first
    kept = sorted(range(n), key=lambda i: (-abs(flat[i]), i))[:k]
    mu = 0.0
    for i in kept:
        mu += abs(flat[i]) / k  # mu = (1/k) sum_i |T_i^mask|
    ternary = np.zeros(n)
    for i in kept:
        ternary[i] = mu * np.sign(flat[i])  # T^ = mu sign(T^mask)
    result = {}
    start = 0
    for name, value in tensors.items():
        result[name] = ternary[start : start + value.size].reshape(value.shape)
        start += value.size
    return result


def float32(tensors: Params) -> Params:
    """Return ``tensors`` rounded to the nearest float32, held in float64."""
    return {name: value.astype(np.float32).astype(np.float64) for name, value in tensors.items()}


def half(tensors: Params) -> Params:
    """Return ``tensors`` in 16 bits: float16 times one float32 number for all of them."""
    top = max(float(np.abs(value).max()) for value in tensors.values())
    scale = max(np.float32(top) / np.float32(65504), np.float32(2.0**-126))
    result = {}
    for name, value in tensors.items():
        rounded = np.empty_like(value)
        for i in np.ndindex(value.shape):
            rounded[i] = np.float32(np.float16(np.float32(value[i]) / scale)) * scale
        result[name] = rounded
    return result


def only_largest(u: Params, v: Params, q: float) -> tuple[Params, Params]:
    """Return ``u`` and ``v`` at the fraction q of entries with largest u, by name; 0 elsewhere."""
    entries = [(name, i) for name in sorted(u) for i in np.ndindex(u[name].shape)]
    kept = sorted(entries, key=lambda entry: -u[entry[0]][entry[1]])  # stable: the first of equals
    u_kept = {name: np.zeros_like(value) for name, value in u.items()}
    v_kept = {name: np.zeros_like(value) for name, value in v.items()}
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
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "num-examples",
    cohorts: list[list[int]] | None = None,
    *,
    lam: float,
    implicit: bool = False,
    density_up: float | None = None,
    density_down: float | None = None,
    steps_done: list[dict[int, int]] | None = None,
    float32_fisher: bool = False,
    sums_bits: int | None = None,
    sums_every: int = 1,
    sums_density: float | None = None,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``.

    ``implicit`` divides the local gradient by 1 + eta lam U. ``density_up`` and
    ``density_down`` are q of ST at the clients and at the server; None sends as
    it is and keeps no residual. ``steps_done[t - 1]`` maps a client to s_k, the number of its E
    steps that it finished in round t: all of them where it is not named, and with 0 it is left out
    of the round. ``float32_fisher`` rounds u_k, then u_k * v_k, and then their sums, to float32.

    u_k and v^_k, and then their sums, travel in ``sums_bits`` (16: see ``half``), at the fraction
    ``sums_density`` of entries with largest u_k or U, and only every ``sums_every`` rounds: in the
    others, every client uses the last sums.
    """
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    w_t = {name: value.copy() for name, value in w.items()}
    # Alg. 1, initialize: R^G, R^k <- 0
    zero = {name: np.zeros_like(value) for name, value in w.items()}
    residual_server = zero
    residuals = [zero for _ in clients]
    sums: tuple[Params, Params] | None = None  # (U, V); none in round 1
    history = []
    for t in range(1, rounds + 1):  # Alg. 1: for each round
        eta = lr(t)
        cohort = list(range(len(clients))) if cohorts is None else cohorts[t - 1]

        # E_k, the steps planned, and s_k, the steps done; s_k = 0 is inactive (Sec. 3.1).
        planned = {}
        done = {}
        for k in cohort:
            planned[k] = epochs * len(clients[k]) if local_steps is None else local_steps
            done[k] = planned[k] if steps_done is None else steps_done[t - 1].get(k, planned[k])
            if not 0 <= done[k] <= planned[k]:
                raise ValueError(f"round {t}, client {k}: {done[k]} of {planned[k]} steps")
        used = [k for k in cohort if done[k] > 0]
        if not used:
            raise ValueError(f"round {t}: no client finished a step")

        # p_k, normalised over the clients whose reply is used.
        if weighting == "num-examples":
            n = [sum(len(y) for _, y in clients[k]) for k in used]
            p = [n_k / sum(n) for n_k in n]
        else:
            p = [1.0 / len(used) for _ in used]
        # Sec. 4.2: p_k^tau = E p_k / s_k, not normalised again
        p = [planned[k] / done[k] * p[i] for i, k in enumerate(used)]

        sent = []
        u_replies = []
        v_replies = []
        for k in used:  # Alg. 1, ClientUpdate
            batches = clients[k]
            v = {name: value.copy() for name, value in w_t.items()}
            for step in range(done[k]):  # for j = 0, ..., s_k - 1
                x, y = batches[step % len(batches)]
                grad = gradient(v, x, y)
                if sums is not None:
                    # Eq. 3: + lam/2 v'Uv - lam v'V, so grad += lam (U * v - V)
                    u_sum, v_sum = sums
                    grad = {
                        name: grad[name] + lam * (u_sum[name] * v[name] - v_sum[name]) for name in v
                    }
                    if implicit:
                        grad = {name: grad[name] / (1.0 + eta * lam * u_sum[name]) for name in v}
                v = {name: v[name] - eta * grad[name] for name in v}  # Eq. 4

            change = {name: v[name] - w_t[name] for name in v}
            if density_up is None:
                sent.append(change)
            else:
                # D_k = R_k + v_k - w_t, sends ST(D_k)
                change = {name: residuals[k][name] + change[name] for name in v}
                compressed = compress(change, density_up)
                # Eq. 5: R_k = D_k - ST(D_k), kept until the client's next turn
                residuals[k] = {name: change[name] - compressed[name] for name in v}
                sent.append(compressed)

            # u_k = diag(I_k), v^_k = diag(I_k) v_k, at v_k itself, before any compression
            u_k = fisher(v, batches)
            u_k = float32(u_k) if float32_fisher else u_k
            v_k = {name: u_k[name] * v[name] for name in v}
            if float32_fisher:
                u_k, v_k = as_sent(u_k, float32(v_k), sums_bits, sums_density)
            u_replies.append(u_k)
            v_replies.append(v_k)

        # Alg. 1, server: D = R^G + sum_k p_k^tau ST(D_k)
        delta = zero
        for i in range(len(used)):
            delta = {name: delta[name] + p[i] * sent[i][name] for name in w_t}
        if density_down is not None:
            delta = {name: residual_server[name] + delta[name] for name in w_t}
            moved = compress(delta, density_down)
            residual_server = {name: delta[name] - moved[name] for name in w_t}  # R = D - ST(D)
            delta = moved
        w_t = {name: w_t[name] + delta[name] for name in w_t}  # w <- w + ST(D)

        history.append(w_t)
        if (t - 1) % sums_every:
            continue
        # U = sum_k u_k and V = sum_k v^_k over this round's replies, for the next round
        u_sum, v_sum = zero, zero
        for i in range(len(used)):
            u_sum = {name: u_sum[name] + u_replies[i][name] for name in w_t}
            v_sum = {name: v_sum[name] + v_replies[i][name] for name in w_t}
        sums = (u_sum, v_sum)
        if float32_fisher:
            sums = as_sent(float32(u_sum), float32(v_sum), sums_bits, sums_density)
    return history
