"""Several terms at once: the formulas of each, in one plain loop.

Every line names its method's oracle or equation; what is not asked for is left out of the loop.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.oracles.client_loss.distillation import loss_and_gradient
from tests.oracles.client_loss.rfedavg import delta as mean_feature
from tests.oracles.client_loss.rfedavg import distance_gradient
from tests.oracles.client_step.efl import compress, fisher, float32
from tests.oracles.model import Batch, Client, Params, gradient


def added(a: Params, b: Params, factor: float = 1.0) -> Params:
    """Return a + factor b; an entry that b lacks stays."""
    return {n: a[n] + factor * b[n] if n in b else a[n] for n in a}


def composed(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    terms: dict[str, dict[str, Any]],
    epochs: int = 1,
    private: tuple[str, ...] = (),
    more: Callable[[int, int, Params, Params, Batch], Params] = lambda t, k, v, w_t, batch: {},
    ended: Callable[[int, Params], Any] = lambda k, v_k: None,
) -> Params:
    """Return the shared entries of the global model after `rounds` of all clients, weights n_k / n.

    `terms` maps a term's name to its hyper-parameters. Its order matters for the local loss alone:
    self-distillation weighs all the loss so far by 1 - lam (Eq. 7). `private` entries stay with their
    client; no penalty, momentum, Fisher information or compression touches them. ``more(t, k, v, w_t,
    batch)`` is the gradient of a further part of the loss, and ``ended(k, v_k)`` is told of each end.
    """
    names = [n for n in w if n not in private]
    w_t = {n: w[n].copy() for n in names}
    own = [{n: w[n].copy() for n in private} for _ in clients]
    zero = {n: np.zeros_like(w[n]) for n in names}
    n_k = [sum(len(y) for _, y in batches) for batches in clients]
    last: tuple[Params, float] | None = None  # (w_t - w_{t-1}, eta of the round that made it)
    server_m = zero  # FedADC's, SlowMo's or ServerOpt's momentum
    second = None  # FedAdam's second moment
    table: dict[int, np.ndarray] = {}  # rFedAvg
    sums: tuple[Params, Params] | None = None  # EFL, FedCurv
    fishers: list[tuple[Params, Params]] = []  # FedCurv: what each client's own share of these is
    residuals, residual = [zero for _ in clients], zero  # EFL, Alg. 2

    for t in range(1, rounds + 1):
        eta = lr(t)
        # rFedAvg+, Alg. 2: every client's mean feature at w_t, before anyone trains
        probes = [mean_feature({**w_t, **mine}, c) for mine, c in zip(own, clients, strict=True)]
        received = dict(table)
        sent, rows, u_all, v_all = [], {}, [], []
        for k, batches in enumerate(clients):
            steps = epochs * len(batches)
            begin = {**w_t, **own[k]}
            counts = np.bincount(np.concatenate([y for _, y in batches]), minlength=3)
            m_bar = zero
            if "fedadc" in terms and last is not None:
                # Alg. 3 line 19 solved for m_t, the momentum in the step that was made; line 5
                scale = terms["fedadc"]["alpha"] * last[1]
                m_bar = {
                    n: -terms["fedadc"]["beta_local"] * last[0][n] / scale / steps for n in w_t
                }
            variant = terms.get("fedadc", {}).get("variant")
            phi = terms.get("fedadc", {}).get("local_momentum")
            u: Params = {}
            v = begin
            for step in range(steps):
                x, y = batches[step % len(batches)]
                if variant == "nesterov" and phi is None:
                    v = added(v, m_bar, -eta)  # Alg. 3 line 7 (red): every gradient is taken here
                grad = gradient(v, x, y)
                for name, p in terms.items():
                    if name == "self-distillation":  # Eq. 7: (1 - lam) base + lam T^2 KL
                        lam, plain = p["lam"], gradient(v, x, y)
                        _, eq7 = loss_and_gradient(v, begin, x, y, counts, lam, p["temperature"])
                        distil = added(eq7, plain, -(1.0 - lam))
                        grad = {n: (1.0 - lam) * grad[n] + distil[n] for n in grad}
                    elif name == "rfedavg":  # Eqs. 3 and 5
                        others = [j for j in received if j != k]
                        for j in others:
                            pull = distance_gradient(v, x, received[j])
                            grad = added(grad, pull, p["lam"] / len(others))
                    elif name == "rfedavg-plus":  # Alg. 2
                        mean = sum(probes[j] for j in range(len(clients)) if j != k)
                        pull = distance_gradient(v, x, mean / (len(clients) - 1))
                        grad = added(grad, pull, p["lam"])
                grad = added(grad, more(t, k, v, w_t, (x, y)))
                moved = {n: v[n] - w_t[n] for n in names}
                if "proximal" in terms:
                    grad = added(grad, moved, terms["proximal"]["mu"])
                if "first-order" in terms and last is not None:
                    g = {n: -last[0][n] / last[1] for n in names}
                    opposing = {n: g[n] * (g[n] * moved[n] > 0.0) for n in names}
                    grad = added(grad, opposing, terms["first-order"]["alpha"])
                if "elastic" in terms and sums is not None:  # Eq. 3
                    pull = {n: sums[0][n] * v[n] - sums[1][n] for n in names}
                    grad = added(grad, pull, terms["elastic"]["lam"])
                if "fedcurv" in terms and sums is not None:  # Shoham et al., Eq. 6
                    u_rest = float32(
                        {n: np.maximum(sums[0][n] - fishers[k][0][n], 0.0) for n in names}
                    )
                    v_rest = float32({n: sums[1][n] - fishers[k][1][n] for n in names})
                    pull = {n: u_rest[n] * v[n] - v_rest[n] for n in names}
                    grad = added(grad, pull, 2.0 * terms["fedcurv"]["lam"])
                if phi is not None:  # Alg. 4 lines 9-14
                    u = grad if step == 0 else {n: phi * u[n] + (1.0 - phi) * grad[n] for n in grad}
                    v = added(added(v, u, -eta), m_bar, -eta)
                else:
                    v = added(v, grad, -eta)
                    if variant == "heavy-ball":
                        v = added(v, m_bar, -eta)  # Alg. 3 line 11 (blue)
            ended(k, v)
            own[k] = {n: v[n] for n in private}
            change = {n: v[n] - w_t[n] for n in names}
            rows[k] = mean_feature(v, batches)  # rFedAvg, Alg. 1 line 10, with v_k
            measured = "elastic" in terms or "fedcurv" in terms
            squares = fisher(v, batches) if measured else zero  # at v_k, uncompressed
            u_all.append(float32(squares))
            v_all.append(float32({n: u_all[-1][n] * v[n] for n in squares}))
            if "ternary" in terms and terms["ternary"]["density_up"] is not None:
                total = added(residuals[k], change)
                change = compress(total, terms["ternary"]["density_up"])
                residuals[k] = added(total, change, -1.0)
            sent.append(change)

        mean = {n: sum(n_k[k] / sum(n_k) * d[n] for k, d in enumerate(sent)) for n in names}
        step_made = mean
        if "fedadc" in terms:  # Alg. 3 lines 16-19
            p = terms["fedadc"]
            carried = p["beta_global"] - p["beta_local"]
            server_m = {n: -mean[n] / eta + carried * server_m[n] for n in names}
            step_made = {n: -p["alpha"] * eta * server_m[n] for n in names}
        elif "slowmo" in terms:  # Alg. 2 lines 12-16
            p = terms["slowmo"]
            server_m = {n: p["beta"] * server_m[n] - mean[n] / eta for n in names}
            step_made = {n: -p["alpha"] * eta * server_m[n] for n in names}
        elif "server-optimizer" in terms:  # heavy-ball SGD as ServerOpt
            p = terms["server-optimizer"]
            server_m = {n: p["momentum"] * server_m[n] - mean[n] for n in names}
            step_made = {n: -p["lr"] * server_m[n] for n in names}
        elif "adaptive-server" in terms:  # Reddi et al., Alg. 2, Adam
            p = terms["adaptive-server"]
            b1, b2, tau = p["beta_1"], p["beta_2"], p["tau"]
            second = second or {n: z + tau**2 for n, z in zero.items()}
            server_m = {n: b1 * server_m[n] + (1.0 - b1) * mean[n] for n in names}
            second = {n: b2 * second[n] + (1.0 - b2) * mean[n] ** 2 for n in names}
            step_made = {n: p["lr"] * server_m[n] / (np.sqrt(second[n]) + tau) for n in names}
        if "ternary" in terms and terms["ternary"]["density_down"] is not None:
            total = added(residual, step_made)
            step_made = compress(total, terms["ternary"]["density_down"])
            residual = added(total, step_made, -1.0)
        w_t, last = added(w_t, step_made), (step_made, eta)
        table = {**table, **rows}
        u_sum, v_sum = ({n: sum(a[n] for a in part) for n in names} for part in (u_all, v_all))
        sums = float32(u_sum), float32(v_sum)
        fishers = list(zip(u_all, v_all, strict=True))
    return w_t
