"""A client's optimiser, its own or the one that the round's config describes; and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from flwr_regs.wire.config import OPTIMIZER_KEYS

OptimizerFn = Callable[..., torch.optim.Optimizer]


def optimizer_of(config: Mapping[str, Any], own: OptimizerFn | None = None) -> OptimizerFn:
    """Return a client's factory ``make(params, lr=lr)``: its own, or what a checked config describes.

    Without either it is ``torch.optim.SGD``. Raises ValueError if there are both.
    """
    given = {key: config[key] for key in OPTIMIZER_KEYS if key in config}
    if own is not None and given:
        raise ValueError(
            f"the train config sets {given}, but this client has an optimiser of its own, {own!r:.200}: "
            "leave out these keys, or build the client (or call loop.optimizer) without one"
        )
    if own is not None:
        return own
    kind: OptimizerFn = getattr(torch.optim, given.pop("optimizer", "SGD"))
    return partial(kind, **{k.replace("-", "_"): v for k, v in given.items()}) if given else kind


def momentum_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Return m such that a constant gradient moves ``η/(1−m)`` a step in the long run; None if unknown.

    SGD's `dampening` counts: with the same value as its momentum, a step is η, so m is 0.
    """
    group = optimizer.param_groups[0]
    if "momentum" not in group or not (damped := 1 - group.get("dampening", 0)) > 0:
        return None
    return float(1 - (1 - group["momentum"]) / damped)


def clip(params: Iterable[nn.Parameter], norm: float) -> None:
    """Scale the gradients down so that all together, as one vector, have at most this norm.

    As ``torch.nn.utils.clip_grad_norm_``, but the norm of half-precision gradients is taken in float32,
    where their squares do not overflow.
    """
    mine = [p for p in params if p.grad is not None]
    grads = [p.grad for p in mine if p.grad is not None]
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
    total = nn.utils.get_total_norm(wide)
    nn.utils.clip_grads_with_norm_(mine, norm, total)
