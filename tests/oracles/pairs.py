"""Several terms at once: the formulas of each, in one plain loop.

Every line names its method's oracle or equation; what is not asked for is left out of the loop.
"""

from typing import Any

import numpy as np

from tests.oracles.client_loss.distillation import distilled
from tests.oracles.client_loss.rfedavg import delta as mean_feature
from tests.oracles.client_loss.rfedavg import distance_gradient
from tests.oracles.client_step.efl import compress, fisher, float32
from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def composed(
    w: Params, *run: Any, terms: dict[str, dict[str, Any]], private: tuple[str, ...] = ()
) -> Params:
    """Return the shared entries of the global model after a run of all clients, weights n_k / n.

    `terms` maps a term's name to its hyper-parameters. Its order matters for the local loss alone:
    self-distillation weighs all the loss so far by 1 - lam (Eq. 7). `private` entries stay with their
    client; no penalty, momentum, Fisher information or compression touches them.
    """
    own: dict[int, Params] = {}
    w_first = {n: w[n] for n in private}
    w = {n: w[n] for n in w if n not in private}
    zero, last, last_eta = zeros(w), zeros(w), 1.0  # w_t - w_{t-1}, eta of the round that made it
    server_m = zero  # FedADC's, SlowMo's or ServerOpt's momentum
    second: Params = {}  # FedAdam's second moment
    table: dict[int, np.ndarray] = {}  # rFedAvg
    sums = zero, zero  # EFL, FedCurv
    fishers: dict[int, tuple[Params, Params]] = {}  # FedCurv: each client's own share of these
    residuals, residual = dict[int, Params](), zero  # EFL, Alg. 2
    adc, ternary = terms.get("fedadc"), terms.get("ternary", {})
    variant, phi = (adc["variant"], adc["local_momentum"]) if adc else (None, None)
    measured = "elastic" in terms or "fedcurv" in terms

    for r in rounds_of(*run):
        begins = {k: {**w, **own.get(k, w_first)} for k in r.used}
        # rFedAvg+, Alg. 2: every client's mean feature at w_t, before anyone trains
        probes = {k: mean_feature(begins[k], r.clients[k]) for k in r.used}
        sent, rows, ends = {}, {}, {}
        for k in r.used:
            labels = np.concatenate([y for _, y in r.clients[k]])
            counts = np.bincount(labels, minlength=3)
            m_bar = zero
            if adc:  # Alg. 3 line 19 solved for m_t, the momentum in the step that was made; line 5
                scale = -adc["beta_local"] / adc["alpha"] / last_eta / r.steps[k]
                m_bar = {n: scale * last[n] for n in w}
            v, u = begins[k], zeros(begins[k])
            for step, (x, y) in enumerate(r.batches(k)):
                if variant == "nesterov" and phi is None:
                    v = plus(v, -r.eta, m_bar)  # Alg. 3 line 7 (red): every gradient is taken here
                plain = grad = r.slope(v, x, y)
                for name, p in terms.items():
                    if name == "self-distillation":  # Eq. 7: (1 - lam) base + lam T^2 KL
                        lam, T = p["lam"], p["temperature"]
                        eq7 = distilled(v, begins[k], x, y, counts, lam, T)
                        grad = plus(eq7, 1.0 - lam, minus(grad, plain))
                    elif name == "rfedavg":  # Eqs. 3 and 5
                        others = [delta for j, delta in table.items() if j != k]
                        for delta in others:
                            pull = distance_gradient(v, x, delta)
                            grad = plus(grad, p["lam"] / len(others), pull)
                    elif name == "rfedavg-plus":  # Alg. 2
                        mean = np.mean([probes[j] for j in r.used if j != k], axis=0)
                        grad = plus(grad, p["lam"], distance_gradient(v, x, mean))
                moved = {n: v[n] - w[n] for n in w}
                if "proximal" in terms:
                    grad = plus(grad, terms["proximal"]["mu"], moved)
                if "first-order" in terms:
                    g = {n: -last[n] / last_eta for n in w}
                    opposing = {n: g[n] * (g[n] * moved[n] > 0.0) for n in w}
                    grad = plus(grad, terms["first-order"]["alpha"], opposing)
                if "elastic" in terms:  # Eq. 3
                    pull = {n: sums[0][n] * v[n] - sums[1][n] for n in w}
                    grad = plus(grad, terms["elastic"]["lam"], pull)
                if "fedcurv" in terms:  # Shoham et al., Eq. 6
                    u_own, v_own = fishers.get(k, (zero, zero))
                    u_rest = float32({n: np.maximum(sums[0][n] - u_own[n], 0.0) for n in w})
                    v_rest = float32(minus(sums[1], v_own))
                    pull = {n: u_rest[n] * v[n] - v_rest[n] for n in w}
                    grad = plus(grad, 2.0 * terms["fedcurv"]["lam"], pull)
                if phi is not None:  # Alg. 4 lines 9-14
                    share = phi if step else 0.0
                    grad = u = {n: share * u[n] + (1.0 - share) * grad[n] for n in grad}
                v = plus(v, -r.eta, grad)
                if variant == "heavy-ball" or phi is not None:
                    v = plus(v, -r.eta, m_bar)  # Alg. 3 line 11 (blue)
            own[k] = {n: v[n] for n in private}
            rows[k] = mean_feature(v, r.clients[k])  # rFedAvg, Alg. 1 line 10, with v_k
            if measured:  # at v_k, uncompressed
                squares = float32(fisher(v, r.clients[k]))
                ends[k] = squares, float32({n: squares[n] * v[n] for n in squares})
            sent[k] = {n: v[n] - w[n] for n in w}
            if ternary.get("density_up"):
                total = plus(sent[k], 1.0, residuals.get(k, zero))
                sent[k] = compress(total, ternary["density_up"])
                residuals[k] = minus(total, sent[k])

        delta_bar = last = r.mean(sent)
        if adc:  # Alg. 3 lines 16-19
            carried = adc["beta_global"] - adc["beta_local"]
            server_m = {n: -delta_bar[n] / r.eta + carried * server_m[n] for n in w}
            last = {n: -adc["alpha"] * r.eta * server_m[n] for n in w}
        elif "slowmo" in terms:  # Alg. 2 lines 12-16
            p = terms["slowmo"]
            server_m = {n: p["beta"] * server_m[n] - delta_bar[n] / r.eta for n in w}
            last = {n: -p["alpha"] * r.eta * server_m[n] for n in w}
        elif "server-optimizer" in terms:  # heavy-ball SGD as ServerOpt
            p = terms["server-optimizer"]
            server_m = {n: p["momentum"] * server_m[n] - delta_bar[n] for n in w}
            last = {n: -p["lr"] * server_m[n] for n in w}
        elif "adaptive-server" in terms:  # Reddi et al., Alg. 2, Adam
            p = terms["adaptive-server"]
            b1, b2, tau = p["beta_1"], p["beta_2"], p["tau"]
            server_m = {n: b1 * server_m[n] + (1.0 - b1) * delta_bar[n] for n in w}
            second = {n: b2 * second.get(n, tau**2) + (1.0 - b2) * delta_bar[n] ** 2 for n in w}
            last = {n: p["lr"] * server_m[n] / (np.sqrt(second[n]) + tau) for n in w}
        if ternary.get("density_down"):
            total = plus(last, 1.0, residual)
            last = compress(total, ternary["density_down"])
            residual = minus(total, last)
        w, last_eta = plus(w, 1.0, last), r.eta
        table |= rows
        if measured:
            u_sum = {n: sum(u[n] for u, _ in ends.values()) for n in w}
            v_sum = {n: sum(v[n] for _, v in ends.values()) for n in w}
            sums, fishers = (float32(u_sum), float32(v_sum)), ends
    return w
