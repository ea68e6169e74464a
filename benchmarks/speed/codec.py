"""Bytes and codec: what a million parameters take on the wire, and how long they take to code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array

from benchmarks.codec import ternary
from benchmarks.speed.timing import Effort, Row, interleaved, say, spread, timed
from flwr_regs.methods.parts.ternary import decode, encode
from flwr_regs.wire import precision

PARAMETERS = 1_000_000
DENSITIES = (0.001, 0.01, 0.1)


def measure(effort: Effort) -> list[Row]:
    """Return a row for each code: bits a parameter, and seconds to code and decode the model."""
    say("codec")
    n = 2000 if effort.quick else PARAMETERS
    dense = {"a": np.random.default_rng(0).standard_normal(n).astype(np.float32)}
    coders: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "float32": (partial(_to_bytes, dense), _from_bytes)
    }
    for dtype in ("bfloat16", "float16"):
        coders[dtype] = partial(_narrowed, dense, dtype), partial(_widened, dtype)
    for density in DENSITIES:
        arrays = {"a": ternary(n, density)}
        coders[f"ternary, density {density:g}"] = (
            partial(encode, arrays),
            partial(_decoded, arrays),
        )
    coded = {name: make() for name, (make, _) in coders.items()}
    sides = {}
    for name, (make, read) in coders.items():
        sides[f"{name} | code"] = partial(timed, make)
        sides[f"{name} | decode"] = partial(timed, partial(read, coded[name]))
    found = interleaved(sides, effort)
    return [
        {
            "side": name,
            "parameters": n,
            "bits": float(f"{8 * len(coded[name]) / n:.4g}"),
            "code-seconds": spread(found[f"{name} | code"]),
            "decode-seconds": spread(found[f"{name} | decode"]),
        }
        for name in coders
    ]


def _to_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    return Array(arrays["a"]).data


def _from_bytes(data: bytes) -> np.ndarray:
    return Array("float32", (), "numpy.ndarray", data).numpy()


def _narrowed(arrays: dict[str, np.ndarray], dtype: str) -> bytes:
    return _to_bytes(precision.narrow(arrays, dtype))


def _widened(dtype: str, data: bytes) -> Any:
    return precision.widen({"a": _from_bytes(data)}, dtype)


def _decoded(like: dict[str, np.ndarray], data: bytes) -> Any:
    return decode(data, like)
