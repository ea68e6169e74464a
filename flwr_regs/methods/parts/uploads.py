"""What a client sends: its update as the server gets it, and its uploads, checked and added up."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from flwr_regs.abilities import Folds
from flwr_regs.term import Arrays, ClientContext, ServerContext, Slot
from flwr_regs.wire import keys


class Sums(Folds):
    """Adds up all that the clients upload, in float64 and each client alike."""

    def fold(
        self, acc: Slot, pid: int, delta: Arrays, upload: Slot, weight: float, ctx: ServerContext
    ) -> Slot:
        for key, a in upload.items():
            acc[key] = acc.get(key, 0.0) + np.asarray(a, dtype=np.float64)
        return acc

    def adds(self, key: str) -> bool:
        return True


def check_arrays(upload: Slot, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise ValueError unless `upload` has these arrays: key -> (dtype's name or "floats", shape)."""
    if upload.keys() != expected.keys():
        raise ValueError(f"arrays {sorted(upload)}, expected {sorted(expected)}")
    for key, (kind, shape) in expected.items():
        a = upload[key]
        fits = a.dtype.kind == "f" if kind == "floats" else a.dtype == kind
        if not fits or a.shape != shape:
            raise ValueError(f"'{key}' is {a.dtype} {a.shape}, expected {kind} {shape}")


def check_like(params: Arrays, upload: Slot) -> None:
    """Raise ValueError unless `upload` has an array of floats for each parameter, of its shape."""
    check_arrays(upload, {n: ("floats", p.shape) for n, p in params.items()})


def as_sent(delta: Arrays, ctx: ClientContext) -> Arrays:
    """Return an update in at least float32, rounded as ``v_k`` is that travels in half precision.

    So client and server count with the same update, and rounding errors do not add up between them. What
    a later term makes of the update is not in it: compression sends what it leaves out another time.
    """
    wide = {n: d.to(torch.promote_types(d.dtype, torch.float32)) for n, d in delta.items()}
    half = ctx.config.get(keys.HALF_KEY)
    if half is None or not ctx.delta_is_sent:
        return wide
    kind = getattr(torch, half)
    return {
        n: (ctx.start[n] + d).to(kind).to(d.dtype) - ctx.start[n] if d.dtype == torch.float32 else d
        for n, d in wide.items()
    }
