"""Clip and mean, without noise. McMahan et al. 2018, Alg. 1; the methods as in their own oracles."""

from __future__ import annotations

import math

import numpy as np

from tests.oracles.model import Client, Params, gradient


def central_dp(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: float,
    epochs: int,
    method: str,
    clip_norm: float,
    failed: frozenset[int] = frozenset(),
    *,
    alpha: float = 1.0,
    beta_local: float = 0.0,
    beta_global: float = 0.0,
) -> tuple[list[Params], int]:
    """Return (the global model after each round, how often an update was clipped).

    ``method``: "fedavg", "fedfor" (``alpha``), "slowmo" (``alpha``, ``beta_global``) or "fedadc", Alg. 3
    red (``alpha`` and both betas). The cohort is everyone; the ``failed`` never answer.
    """
    w_t = {name: value.copy() for name, value in w.items()}
    m_t = {name: np.zeros_like(value) for name, value in w.items()}
    step: Params | None = None
    history = []
    clipped = 0
    for _ in range(rounds):
        total = {name: np.zeros_like(value) for name, value in w.items()}
        for k, batches in enumerate(clients):
            if k in failed:
                continue
            steps = epochs * len(batches)
            v = {name: value.copy() for name, value in w_t.items()}
            for i in range(steps):
                x, y = batches[i % len(batches)]
                if method == "fedadc":
                    v = {n: v[n] - lr * beta_local * m_t[n] / steps for n in v}
                grad = gradient(v, x, y)
                if method == "fedfor" and step is not None:
                    for n in v:
                        g = -step[n] / lr
                        grad[n] = grad[n] + alpha * g * (g * (v[n] - w_t[n]) > 0)
                v = {n: v[n] - lr * grad[n] for n in v}
            square = 0.0
            for n in v:
                for d in (v[n] - w_t[n]).ravel():
                    square += float(d) ** 2
            factor = 1.0
            if math.sqrt(square) > clip_norm:
                factor = clip_norm / math.sqrt(square)
                clipped += 1
            for n in v:
                total[n] += factor * (v[n] - w_t[n])
        mean = {n: total[n] / len(clients) for n in w}  # everyone who was drawn
        if method == "slowmo":
            m_t = {n: beta_global * m_t[n] - mean[n] / lr for n in w}
            step = {n: -alpha * lr * m_t[n] for n in w}
        elif method == "fedadc":
            m_t = {n: -mean[n] / lr + (beta_global - beta_local) * m_t[n] for n in w}
            step = {n: -alpha * lr * m_t[n] for n in w}
            m_t = {n: -step[n] / (alpha * lr) for n in w}
        else:
            step = mean
        w_t = {n: w_t[n] + step[n] for n in w}
        history.append(w_t)
    return history, clipped
