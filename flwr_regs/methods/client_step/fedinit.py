"""FedInit: each client starts a little beyond the global model, away from its own last one.

| *Init*       nothing
| *Broadcast*  ``w_t``
| *Step*       from ``v = w_t + β (w_t − v_k)``: ``v ← ClientOpt(v, ∇f_k(v))``
| *Upload*     ``v_k``, with which the round ended. The client keeps it, whether or not its reply is used
| *Update*     ``w ← mean v_k``

A client that never trained, or lost its model, starts at ``w_t``. What it sends is ``v_k − w_t``, as
always: the relaxed start is part of its update. So methods that read a client's gradients off its update
are refused beside it (SCAFFOLD, VRL-SGD, FedNova).

Source: Sun, Shen, Tao, "Understanding how consistency works in federated learning via stage-wise relaxed
initialization" (2023), Alg. 1. Its server averages the clients alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.term import NOT_NEGATIVE, Arrays, ClientContext, Ranges, Slot, Term

__all__ = ["FedInit", "FedInitClient", "RelaxedStart"]


@dataclass(frozen=True)
class RelaxedStart(Term):
    """FedInit's start ``w_t + β (w_t − v_k)`` (Alg. 1).

    Parameters
    ----------
    beta : float
        β ≥ 0, dimensionless; 0 is FedAvg.
    """

    name: ClassVar[str] = "fedinit"
    keeps: ClassVar[str] = "always"
    keeps_update: ClassVar[bool] = True
    excludes: ClassVar[dict[str, str]] = dict.fromkeys(
        ("scaffold", "gradient-tracking", "fednova"),
        "FedInit starts a client's steps elsewhere than at w_t, which the other counts from: keep one",
    )
    ranges: ClassVar[Ranges] = {"beta": NOT_NEGATIVE}
    beta: float = 0.1

    def start(self, params: Arrays, ctx: ClientContext) -> Arrays:
        last = ctx.client
        return {n: p + self.beta * (p - last[n]) if n in last else p for n, p in params.items()}

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {}, {n: ctx.start[n] + d for n, d in delta.items()}  # v_k


class FedInit(MethodStrategy):
    """FedAvg with a relaxed start of each client.

    Parameters
    ----------
    beta : float
        See :class:`RelaxedStart`. The paper tries 0.01 to 0.15, and uses 0.1.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, beta: float = 0.1, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([RelaxedStart(beta)], weighting=weighting, **kwargs)


class FedInitClient(MethodClient):
    """The client of :class:`FedInit`."""

    terms = (RelaxedStart,)
