"""What methods ask of the clients' optimiser that compute with the steps of plain SGD."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch

from flwr_regs.abilities import Restricts, Steers
from flwr_regs.client.train.optimizer import Trial
from flwr_regs.term import Term

PLAIN = ("momentum", "maximize", "lr")
"""What plain SGD leaves alone. Its weight decay is part of the gradient: of the L2-regularised loss."""

SCHEDULE = (
    "{} counts on the round's learning rate in each local step, but the loop changes it: leave the "
    "schedule out; for one over rounds, give the strategy an lr_schedule"
)
"""Said of a schedule within a round, by methods that count on the rate alone."""


def unlike_sgd(optimizer: Callable[..., Any], settings: Collection[str] = PLAIN) -> str:
    """Return what a factory ``optimizer(params, lr=lr)`` makes instead of SGD; "" for SGD.

    `settings` are those of SGD that it must leave alone: ``"lr"`` the learning rate, others at 0. An
    optimiser of the user's own counts as SGD if its class declares ``plain_sgd = True``.
    """
    made = optimizer(Trial([torch.zeros(1, requires_grad=True)]), lr=1.0)
    groups = getattr(made, "param_groups", ())
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


class CountsOnSGD(Term, Steers, Restricts):
    """A term that counts on a client's steps of plain SGD, if it acts on the client's optimiser."""

    def client_optimizer(self, make: Callable[..., Any]) -> Callable[..., Any]:
        if self.acts("client_optimizer") and (what := unlike_sgd(make)):
            raise ValueError(self.counts_on_sgd.format(f"{what} may take other steps"))
        return make

    def restrict(self, config: Mapping[str, Any]) -> None:
        if self.acts("client_optimizer") and "clip-norm" in config:
            clips = "'clip-norm' in the train config clips their gradients"
            raise ValueError(self.counts_on_sgd.format(clips))


def with_settings(optimizer: Callable[..., Any], **settings: float) -> Callable[..., Any]:
    """Return a factory with these settings too; raise ValueError for one that does not take them."""
    try:
        signature(optimizer).bind([], lr=1.0, **settings)
    except TypeError:
        raise ValueError(
            f"the method sets {' and '.join(settings)} of the client's optimiser, which its factory does "
            "not take: give torch.optim.SGD, or a function of (params, **settings) that returns one"
        ) from None
    return partial(optimizer, **settings)
