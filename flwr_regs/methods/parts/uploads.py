"""Checks of the arrays that a client uploads."""

from __future__ import annotations

from collections.abc import Mapping

from flwr_regs.term import Arrays, Slot


def check_arrays(upload: Slot, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise ValueError unless `upload` has these arrays: key -> (dtype's name or "floats", shape)."""
    if upload.keys() != expected.keys():
        raise ValueError(f"arrays {sorted(upload)}, expected {sorted(expected)}")
    for key, (kind, shape) in expected.items():
        a = upload[key]
        fits = a.dtype.kind == "f" if kind == "floats" else a.dtype.name == kind
        if not fits or a.shape != shape:
            raise ValueError(f"'{key}' is {a.dtype} {a.shape}, expected {kind} {shape}")


def check_like(params: Arrays, upload: Slot) -> None:
    """Raise ValueError unless `upload` has an array of floats for each parameter, of its shape."""
    check_arrays(upload, {n: ("floats", p.shape) for n, p in params.items()})
