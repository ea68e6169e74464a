"""Averaging the clients' models, in a fixed order and in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flwr_regs.term import Slot


@dataclass(frozen=True)
class Reply:
    """One client's usable reply.

    Attributes
    ----------
    arrays : mapping
        ``v_k`` by name; an array that is neither here nor in `delta` equals that of ``w_t``.
    uploads : Slot
        The terms' uploads by term name.
    metrics : mapping
    num_examples : float
        ``n_k``.
    delta : mapping
        ``v_k − w_t`` of the arrays that were sent as differences.
    steps : tuple
        ``s_k`` and E, the local steps taken and planned; (1, 1) if the client did not report them.
    tied : mapping
        Tied weights, other name -> trained name.
    """

    arrays: Mapping[str, np.ndarray]
    uploads: Slot
    metrics: Any
    num_examples: float
    delta: Mapping[str, np.ndarray] = field(default_factory=dict)
    steps: tuple[int, int] = (1, 1)
    tied: Mapping[str, str] = field(default_factory=dict)


Mean = Callable[[Mapping[str, Any], Mapping[int, Reply], Mapping[int, float]], dict[str, Any]]
"""A mean of the replies: (model, replies, weights) -> ``Δ`` for every array of the model."""


def aggregation_weights(replies: Mapping[int, Reply], weighting: str) -> dict[int, float]:
    """Return ``p_k`` by partition id; they sum to one over the used replies.

    ``n_k / Σ n`` for ``"num-examples"``, ``1/|S_t|`` for ``"uniform"``.
    """
    raw = {k: r.num_examples if weighting == "num-examples" else 1.0 for k, r in replies.items()}
    total = sum(raw.values())
    return {k: v / total for k, v in raw.items()}


def scaled(weights: Mapping[int, float], replies: Mapping[int, Reply]) -> dict[int, float]:
    """Return ``p_k^τ = (E / s_k) p_k`` for clients that took ``s_k`` of their E steps (EFL, Sec. 4.2)."""
    return {k: p * replies[k].steps[1] / replies[k].steps[0] for k, p in weights.items()}


def mean_delta(
    base: Mapping[str, np.ndarray], replies: Mapping[int, Reply], weights: Mapping[int, float]
) -> dict[str, np.ndarray]:
    """Return ``Σ p_k (v_k − w_t)`` for every array of the model, buffers too.

    Sums in the order of `replies` and in float64: the result does not depend on the order of arrival, and
    a small update is not lost beside a large weight. Floats come back in their own dtype, integers and
    booleans in float64 (their mean need not be whole).
    """
    out = {}
    for name, w in base.items():
        w64 = w.astype(np.float64)
        w64[~np.isfinite(w64)] = 0.0  # an infinite constant (a mask) is the same everywhere
        total = np.zeros_like(w64)
        for k, reply in replies.items():
            if name in reply.delta:
                total += weights[k] * reply.delta[name].astype(np.float64)
            elif name in reply.arrays:
                v = reply.arrays[name].astype(np.float64)
                v[~np.isfinite(v)] = 0.0
                total += weights[k] * (v - w64)
        out[name] = total.astype(w.dtype) if np.issubdtype(w.dtype, np.floating) else total
    return out
