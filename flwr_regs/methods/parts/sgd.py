"""What methods ask of the clients' optimiser that compute with the steps of plain SGD."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch

PLAIN = ("momentum", "maximize", "lr")
"""What plain SGD leaves alone. Its weight decay is part of the gradient: of the L2-regularised loss."""


def unlike_sgd(optimizer: Callable[..., Any], settings: Collection[str] = PLAIN) -> str:
    """Return what a factory ``optimizer(params, lr=lr)`` makes instead of SGD; "" for SGD.

    `settings` are those of SGD that it must leave alone: ``"lr"`` the learning rate, others at 0. An
    optimiser of the user's own counts as SGD if its class declares ``plain_sgd = True``.
    """
    made = optimizer([torch.zeros(1, requires_grad=True)], lr=1.0)
    groups = made.param_groups
    odd = [key for key in settings if key != "lr" and any(group.get(key) for group in groups)]
    if "lr" in settings and any(group["lr"] != 1.0 for group in groups):
        odd.append("a learning rate of its own")
    declared = getattr(made, "plain_sgd", False)
    if (declared or isinstance(made, torch.optim.SGD)) and not odd:
        return ""
    what = type(made).__name__ + (f" with {' and '.join(odd)}" if odd else "")
    ours = type(made).__module__.startswith("torch.optim") or declared
    hint = "if its steps are those of plain SGD, set plain_sgd = True in its class"
    return what if ours else f"{what} ({hint})"


def check_plain(
    optimizer: Callable[..., Any], refused: str, settings: Collection[str] = PLAIN
) -> None:
    """Raise ValueError, the sentence `refused` about a factory, unless it makes plain SGD."""
    if what := unlike_sgd(optimizer, settings):
        raise ValueError(refused.format(f"{what} may take other steps"))


def with_settings(optimizer: Callable[..., Any], **settings: float) -> Callable[..., Any]:
    """Return a factory with these settings too; raise ValueError for one that does not take them."""
    try:
        signature(optimizer).bind([], lr=1.0, **settings)
    except TypeError:
        raise ValueError(
            f"the method sets {' and '.join(settings)} of the client's optimiser, which its factory does "
            "not take: give torch.optim.SGD, or lambda params, **settings: torch.optim.SGD(params, "
            "**settings)"
        ) from None
    return partial(optimizer, **settings)


def check_unclipped(config: Mapping[str, Any], refused: str) -> None:
    """Raise ValueError, the sentence `refused` about a train config, if it clips gradients."""
    if "clip-norm" in config:
        raise ValueError(refused.format("'clip-norm' in the train config clips their gradients"))
