"""A client's update as the server gets it."""

from __future__ import annotations

import torch

from flwr_regs.term import Arrays, ClientContext
from flwr_regs.wire import keys


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
