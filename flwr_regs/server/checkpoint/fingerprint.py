"""What a training is: method, hyper-parameters, settings, model. A resumed run must be the same one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from flwr_regs.server.options import Options
from flwr_regs.wire.arrays import NDArrays

Fingerprint = Mapping[str, Mapping[str, Any]]
"""Kind -> name -> value."""
MAY_DIFFER = {
    *("checkpoint_dir", "checkpoint_every", "on_round", "stop_when", "wait_timeout", "deadline"),
    *("retries", "retry_cohort", "retry_pause", "population", "min_available_nodes"),
    *("min_replies", "on_divergence", "fraction_evaluate", "min_evaluate_nodes"),
    *("evaluate_metrics_aggr_fn", "train_metrics_aggr_fn", "term"),
}
"""Settings that a resumed run may change: they do not say what a round computes."""


def fingerprint(
    method: str, options: Options, model: NDArrays, train_config: Mapping[str, Any]
) -> Fingerprint:
    """Return what must not differ, as plain values."""
    terms = options.term.terms
    return {
        "method": {"method": method, "terms": [t.name for t in terms]},
        "hyper-parameter": {f"{t.name}.{k}": v for t in terms for k, v in _fields(t).items()},
        "setting": {k: v for k, v in _fields(options).items() if k not in MAY_DIFFER},
        "train_config": {k: plain(v) for k, v in sorted(train_config.items())},
        "initial_arrays": {n: f"{a.dtype}{list(a.shape)}" for n, a in model.items()},
    }


def differences(saved: Fingerprint, current: Fingerprint) -> list[str]:
    """Return the differences of two fingerprints in words."""
    changes = []
    for kind, after in current.items():
        before = saved[kind]
        for name in {**before, **after}:
            a, b = before.get(name, "absent"), after.get(name, "absent")
            if a != b:
                named = name if kind == "method" else f"{kind} {name}"
                # down to where they differ
                while isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
                    key = next(k for k in a if a[k] != b[k])
                    named, a, b = f"{named}.{key}", a[key], b[key]
                changes.append(f"{named} was {a!r:.80}, now it is {b!r:.80}")
    return changes


def plain(value: Any) -> Any:
    """Return a value in a form that compares and can be written; a function becomes its name."""
    if isinstance(value, Enum):  # some are texts, too
        return value.value
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float) and math.isnan(value):  # which equals nothing
        return "nan"
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, partial):
        named = {k: plain(v) for k, v in value.keywords.items()}
        return [plain(value.func), [plain(a) for a in value.args], named]
    if is_dataclass(value) and not isinstance(value, type):
        return {type(value).__qualname__: _fields(value)}
    if (config := getattr(value, "config", None)) is not None and is_dataclass(config):
        return {type(value).__qualname__: _fields(config)}  # an accountant
    return getattr(value, "__qualname__", type(value).__qualname__)


def _fields(owner: Any) -> dict[str, Any]:
    return {f.name: plain(getattr(owner, f.name)) for f in fields(owner)}
