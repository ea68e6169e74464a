"""FedVARP: the last update of each client stands in for the clients that a round leaves out.

| *Init*       ``y_k = 0`` for every client
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← ClientOpt(v, ∇f_k(v))``
| *Upload*     ``v_k``
| *Update*     ``w ← w + mean_S(Δ_k − y_k) + (1/N) Σ_j y_j``, then ``y_k ← Δ_k`` for k in S

``Δ_k = v_k − w_t``, N the population, S the replies that are used. A client counts in the sum over all with
the last update of it that the server used, however old. So the variance that comes from who takes part is
gone but for how far updates move between a client's turns. If all take part, it is FedAvg.

**Memory**: the server holds N models beside the global one, and so do checkpoints. They are in float32 at
least. Clients keep nothing, and any client of FedAvg's will do.

The y_k of departed clients stay in the sum. With other weights than uniform ones ``mean_S`` has p_k; the
sum over all clients counts them alike. Refused: whatever gives updates weights of its own, as y_k would
then not be what the mean is made of (FedNova, q-FedAvg, ``incomplete="scale"``); and a robust aggregator,
as it does not reach the y_k.

Source: Jhunjhunwala, Sharma, Nagarkatti, Joshi, "FedVARP: Tackling the variance due to partial client
participation in federated learning" (2022), Alg. 1. Its server averages the clients alike, so ``weighting``
is "uniform".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flwr_regs.abilities import CountsOnMean, Folds
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.uploads import kept
from flwr_regs.term import Arrays, ServerContext, ServerStep, Slot, Term

__all__ = ["FedVARP", "FedVARPClient", "LastUpdates"]


@dataclass(frozen=True)
class LastUpdates(Term, Folds, CountsOnMean):
    """FedVARP's step from this round's updates and the last ones of all clients (Alg. 1)."""

    name: ClassVar[str] = "fedvarp"
    reads_lr: ClassVar[bool] = False
    excludes: ClassVar[Mapping[str, str]] = {
        "gradient-tracking": "it needs the clients' mean as the step, which FedVARP replaces: keep one",
    }

    def fold(
        self, acc: Slot, pid: int, delta: Arrays, upload: Slot, weight: float, ctx: ServerContext
    ) -> Slot:
        acc |= {f"y{pid}.{n}": kept(d, ctx.params[n]) for n, d in delta.items()}
        return acc

    def update(self, server: Slot, delta: Arrays, uploads: Slot, ctx: ServerContext) -> ServerStep:
        step = dict(delta)
        for key, y in server.items():
            who, _, n = key.partition(".")
            share = 1 / ctx.population - ctx.weights.get(int(who[1:]), 0.0)
            step[n] = step[n] + share * np.asarray(y, dtype=np.float64)
        return {**server, **uploads}, step


class FedVARP(MethodStrategy):
    """FedAvg without the variance of partial participation (Alg. 1).

    Parameters
    ----------
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([LastUpdates()], weighting=weighting, **kwargs)


class FedVARPClient(MethodClient):
    """The client of :class:`FedVARP`."""

    terms = ()
