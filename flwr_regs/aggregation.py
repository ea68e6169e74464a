"""Averaging the clients' models, in a fixed order and in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flwr_regs.method import Slot


@dataclass(frozen=True)
class Reply:
    """One client's usable answer: its arrays by name, the terms' uploads, metrics and ``n_k``."""

    arrays: Mapping[str, np.ndarray]
    uploads: Slot
    metrics: Any
    num_examples: float


def aggregation_weights(replies: Mapping[int, Reply], weighting: str) -> dict[int, float]:
    """Return ``p_k`` by partition id, summing to one over the replies that are used.

    ``n_k / Σ n`` for ``"num-examples"``, ``1/|S_t|`` for ``"uniform"``.
    """
    raw = {k: r.num_examples if weighting == "num-examples" else 1.0 for k, r in replies.items()}
    total = sum(raw.values())
    return {k: v / total for k, v in raw.items()}


def mean_delta(
    base: Mapping[str, np.ndarray], replies: Mapping[int, Reply], weights: Mapping[int, float]
) -> dict[str, np.ndarray]:
    """Return ``Σ p_k (v_k − w_t)`` for every array of the model, buffers too.

    Summed in the order of `replies` and in float64, so that the result does not depend on the order
    of arrival and a small update is not lost beside a large weight; floats come back in their own
    dtype, integers and booleans in float64 (their mean need not be whole).
    """
    out = {}
    for name, w in base.items():
        w64 = w.astype(np.float64)
        w64[~np.isfinite(w64)] = 0.0  # an infinite constant (a mask) is the same everywhere
        total = np.zeros_like(w64)
        for k, reply in replies.items():
            v = reply.arrays[name].astype(np.float64)
            v[~np.isfinite(v)] = 0.0
            total += weights[k] * (v - w64)
        out[name] = total.astype(w.dtype) if np.issubdtype(w.dtype, np.floating) else total
    return out
