"""What methods share that use the last global step on the clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flwr_regs.abilities import Recovers
from flwr_regs.term import Arrays, ClientContext, ServerContext, Slot, Term
from flwr_regs.wire import keys


@dataclass(frozen=True)
class LastStep(Term, Recovers):
    """A term that broadcasts what `recover` makes of the last global step; nothing in round 1.

    That is ``g = (w_{t−1} − w_t) / η``, η of the round that made it.
    """

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        if ctx.previous_step is None or ctx.previous_lr is None:
            return {}
        return self.recover(ctx.previous_step, ctx.previous_lr)

    def recover(self, step: Arrays, lr: float) -> Slot:
        """Return ``g``, by parameter name."""
        return {n: -s / lr for n, s in step.items()}


def steps_to_spread(ctx: ClientContext) -> Any:
    """Return over how many local steps a client spreads what it takes of the last step.

    These are its planned steps, or its step budget if that is smaller. Under ``incomplete="scale"`` the
    server multiplies its update by ``E / s_k``, so there they are the planned ones.
    """
    scaled = ctx.config.get(keys.INCOMPLETE_KEY) == "scale"
    return ctx.planned_steps if scaled else ctx.budget_steps
