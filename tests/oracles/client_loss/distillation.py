"""FedADC+: FedADC with self-confidence knowledge distillation.

Ozfatura et al. 2021, Sec. III, Eqs. 6-9, and Alg. 3 for the rounds.
"""

import math
from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, dlogits_backprop, log_softmax, logits


def target(teacher_p: np.ndarray, y: np.ndarray, class_counts: np.ndarray) -> np.ndarray:
    """Return p_hat (B, c) of Eqs. 8 and 9 from the teacher's probabilities p~ (B, c)."""
    classes = len(class_counts)
    gamma = [class_counts[i] / sum(class_counts) for i in range(classes)]  # class shares
    rho = [gamma[i] / max(gamma) for i in range(classes)]  # rho_i = gamma_i / gamma_max
    p_hat = np.zeros_like(teacher_p)
    for b in range(len(y)):
        others = 0.0
        for i in range(classes):
            if i != y[b]:
                p_hat[b, i] = (1.0 - rho[i]) * teacher_p[b, i]  # Eq. 8
                others += p_hat[b, i]
        p_hat[b, y[b]] = 1.0 - others  # Eq. 9
    return p_hat


def loss_and_gradient(
    w: Params,
    w_global: Params,
    x: np.ndarray,
    y: np.ndarray,
    class_counts: np.ndarray,
    lam: float,
    temperature: float,
) -> tuple[float, Params]:
    """Return Eq. 7's loss on one batch, and its gradient with respect to ``w``.

    (1 - lam) CE + lam T^2 KL(p_hat || p), each the mean over the batch; the teacher ``w_global``
    and so p_hat are constants. ``class_counts`` (c,) are the client's own, 0 for absent classes.
    """
    z = logits(w, x)
    log_q = log_softmax(z)  # CE is at temperature 1
    log_p = log_softmax(z / temperature)  # Eq. 6: p = softmax(logits / T)
    teacher_p = np.exp(log_softmax(logits(w_global, x) / temperature))  # p~
    p_hat = target(teacher_p, y, class_counts)

    size, classes = z.shape
    ce = 0.0
    kl = 0.0
    for b in range(size):
        ce -= log_q[b, y[b]]
        for i in range(classes):
            if p_hat[b, i] > 0.0:  # 0 log 0 = 0
                # Eq. 6: KL = -sum_i p_hat_i log(p_i / p_hat_i)
                kl -= p_hat[b, i] * (log_p[b, i] - math.log(p_hat[b, i]))
    ce /= size
    kl /= size
    value = (1.0 - lam) * ce + lam * temperature**2 * kl  # Eq. 7, with the T^2 of CS-KD

    # d CE/dz = q - onehot(y);  d KL/dz = (p - p_hat) / T, as sum_i p_hat_i = 1;  both / B
    g = np.zeros_like(z)
    for b in range(size):
        for i in range(classes):
            onehot = 1.0 if i == y[b] else 0.0
            d_ce = math.exp(log_q[b, i]) - onehot
            d_kl = (math.exp(log_p[b, i]) - p_hat[b, i]) / temperature
            g[b, i] = ((1.0 - lam) * d_ce + lam * temperature**2 * d_kl) / size
    return float(value), dlogits_backprop(w, x, g)


def fedadc_plus(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "uniform",
    cohorts: list[list[int]] | None = None,
    *,
    beta_local: float,
    beta_global: float,
    alpha: float = 1.0,
    variant: str = "nesterov",
    lam: float = 0.35,
    temperature: float = 1.0,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``.

    Alg. 3 with Eq. 7 as the local loss. The teacher is w_t as the round received it (for the
    Nesterov variant too: the shift moves the student only).
    """
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    if variant not in ("nesterov", "heavy-ball"):
        raise ValueError(variant)
    w_t = {name: value.copy() for name, value in w.items()}
    m_t = {name: np.zeros_like(value) for name, value in w.items()}  # gradient units, starts at 0
    classes = len(w["2.bias"])
    history = []
    for t in range(1, rounds + 1):
        eta = lr(t)
        cohort = list(range(len(clients))) if cohorts is None else cohorts[t - 1]

        # Aggregation weights p_k, normalised over the cohort.
        if weighting == "num-examples":
            n = [sum(len(y) for _, y in clients[k]) for k in cohort]
            p = [n_k / sum(n) for n_k in n]
        else:
            p = [1.0 / len(cohort) for _ in cohort]

        changes = []
        for k in cohort:
            batches = clients[k]
            # gamma's counts: all of the client's own data, over all c classes
            counts = np.zeros(classes)
            for _, labels in batches:
                for label in labels:
                    counts[label] += 1.0
            steps = epochs * len(batches) if local_steps is None else local_steps  # K_k
            v = {name: value.copy() for name, value in w_t.items()}  # Alg. 3 line 4
            # line 5, H being the client's own number of steps K_k
            m_bar = {name: beta_local * m_t[name] / steps for name in v}
            for step in range(steps):  # line 6
                x, y = batches[step % len(batches)]
                if variant == "nesterov":
                    v_half = {name: v[name] - eta * m_bar[name] for name in v}  # line 7 (red)
                    # line 8 (red), with Eq. 7's loss
                    _, grad = loss_and_gradient(v_half, w_t, x, y, counts, lam, temperature)
                    v = {name: v_half[name] - eta * grad[name] for name in v}  # line 9 (red)
                else:
                    # line 10 (blue), with Eq. 7's loss
                    _, grad = loss_and_gradient(v, w_t, x, y, counts, lam, temperature)
                    v = {name: v[name] - eta * (grad[name] + m_bar[name]) for name in v}  # line 11
            changes.append({name: w_t[name] - v[name] for name in v})  # line 14: D_k = w_t - v_k

        # line 16: mean change in gradient units, (1/eta) sum_k p_k D_k
        delta_bar = {
            name: sum(p[i] * changes[i][name] for i in range(len(cohort))) / eta for name in w_t
        }
        # line 17
        m_t = {name: delta_bar[name] + (beta_global - beta_local) * m_t[name] for name in w_t}
        # line 19, with m_{t+1}
        w_t = {name: w_t[name] - alpha * eta * m_t[name] for name in w_t}
        history.append(w_t)
    return history
