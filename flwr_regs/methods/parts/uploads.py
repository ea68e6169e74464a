"""What a client sends: its update as the server gets it, and its uploads, checked and added up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from flwr_regs.abilities import Folds
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, Slot
from flwr_regs.wire import keys

T = TypeVar("T")


class Sums(Folds):
    """Adds up what `addends` says of each client, in float64: by default all that it uploads."""

    def addends(self, pid: int, delta: Arrays, upload: Slot, ctx: ServerContext) -> Slot:
        """Return one client's share of the sums."""
        return upload

    def fold(
        self, acc: Slot, pid: int, delta: Arrays, upload: Slot, weight: float, ctx: ServerContext
    ) -> Slot:
        for key, a in self.addends(pid, delta, upload, ctx).items():
            acc[key] = acc.get(key, 0.0) + np.asarray(a, dtype=np.float64)
        return acc

    def adds(self, key: str) -> bool:
        return True


def grown(server: Slot, ctx: ServerContext) -> float:
    """Return the number of clients at the last update over that of now.

    A mean over all clients shrinks by it: clients that came since then bring 0. The server keeps the number
    as its entry ``clients``.
    """
    return float(server.get("clients", ctx.population) / ctx.population)


def kept(a: Any, like: Any = None) -> np.ndarray:
    """Return a copy of an array for the server: in its dtype, or that of `like`, but float32 at least."""
    return np.array(a, np.promote_types((a if like is None else like).dtype, np.float32))


def wide(a: Any) -> Any:
    """Return a tensor in float32 at least: half precision loses squares and small steps."""
    return a.to(torch.promote_types(a.dtype, torch.float32))


def under(slot: Slot, prefix: str) -> Slot:
    """Return the entries of a slot whose keys begin with `prefix`, by what stands behind it."""
    return {k.removeprefix(prefix): a for k, a in slot.items() if k.startswith(prefix)}


def joined(**parts: Arrays) -> Slot:
    """Return arrays under ``"<part>.<name>"``: what `under` takes apart."""
    return {f"{part}.{n}": a for part, arrays in parts.items() for n, a in arrays.items()}


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


def unlike_most(claims: Mapping[int, T], what: str, size: Callable[[T], int]) -> dict[int, str]:
    """Return why, for clients that claim another thing than most; of equally many, the largest counts."""
    each = sorted(claims.values(), key=size, reverse=True)
    usual = max(each, key=each.count, default=None)
    agree = sum(claim == usual for claim in each)
    whose = "most clients'" if 2 * agree > len(each) else "another client's"
    text = f"{what}, but {whose} {{}}"
    return {pid: text.format(claim, usual) for pid, claim in claims.items() if claim != usual}


def as_sent(delta: Arrays, ctx: ClientContext) -> Arrays:
    """Return an update in at least float32, rounded as ``v_k`` is that travels in half precision.

    So client and server count with the same update, and rounding errors do not add up between them. What
    a later term makes of the update is not in it: compression sends what it leaves out another time.
    """
    update = {n: wide(d) for n, d in delta.items()}
    half = ctx.config.get(keys.HALF_KEY)
    if half is None or not ctx.delta_is_sent:
        return update
    kind = getattr(torch, half)
    return {
        n: (ctx.start[n] + d).to(kind).to(d.dtype) - ctx.start[n] if d.dtype == torch.float32 else d
        for n, d in update.items()
    }
