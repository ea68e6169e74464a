"""FedADC+: FedADC with self-confidence knowledge distillation.

Ozfatura et al. 2021, Sec. III, Eqs. 6-9, and Alg. 3 for the rounds.
"""

import math
from typing import Any

import numpy as np

from tests.oracles.client_step.fedadc import fedadc
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


def distilled(
    w: Params,
    w_global: Params,
    x: np.ndarray,
    y: np.ndarray,
    class_counts: np.ndarray,
    lam: float,
    temperature: float,
) -> Params:
    """Return the gradient of Eq. 7's loss on one batch with respect to ``w``.

    (1 - lam) CE + lam T^2 KL(p_hat || p), each the mean over the batch; the teacher ``w_global``
    and so p_hat are constants. ``class_counts`` (c,) are the client's own, 0 for absent classes.
    """
    z = logits(w, x)
    log_q = log_softmax(z)  # CE is at temperature 1
    log_p = log_softmax(z / temperature)  # Eq. 6: p = softmax(logits / T)
    teacher_p = np.exp(log_softmax(logits(w_global, x) / temperature))  # p~
    p_hat = target(teacher_p, y, class_counts)

    size, classes = z.shape
    # Eq. 7, with the T^2 of CS-KD
    # d CE/dz = q - onehot(y);  d KL/dz = (p - p_hat) / T, as sum_i p_hat_i = 1;  both / B
    g = np.zeros_like(z)
    for b in range(size):
        for i in range(classes):
            onehot = 1.0 if i == y[b] else 0.0
            d_ce = math.exp(log_q[b, i]) - onehot
            d_kl = (math.exp(log_p[b, i]) - p_hat[b, i]) / temperature
            g[b, i] = ((1.0 - lam) * d_ce + lam * temperature**2 * d_kl) / size
    return dlogits_backprop(w, x, g)


def fedadc_plus(
    w: Params, *run: Any, lam: float = 0.35, temperature: float = 1.0, **how: Any
) -> list[Params]:
    """Return the global model after each round: Alg. 3 with Eq. 7 as the local loss.

    The teacher is w_t as the round received it (for the Nesterov variant too: the shift moves the student
    only). The class counts are of all of the client's own data, over all classes.
    """

    def local(w_t: Params, data: Client, v: Params, x: np.ndarray, y: np.ndarray) -> Params:
        counts = np.bincount(np.concatenate([y for _, y in data]), minlength=len(w["2.bias"]))
        return distilled(v, w_t, x, y, counts, lam, temperature)

    return fedadc(w, *run, local=local, **how)
