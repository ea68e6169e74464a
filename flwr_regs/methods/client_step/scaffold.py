"""SCAFFOLD: control variates correct the drift of each client's steps.

| *Init*       ``c = 0``, and ``c_k = 0`` for every client
| *Broadcast*  ``w_t`` and c, from round 2; with ``state="server"`` ``c − c_k``, to each client its own
| *Step*       ``v ← v − η (∇f_k(v) − c_k + c)``  (Alg. 1, line 11)
| *Upload*     ``v_k``. The client keeps ``c_k⁺`` (line 13): option 1: ``∇F_k(w_t)``, over all its data;
|              option 2: ``c_k − c + (w_t − v_k)/(K_k η)``
| *Update*     ``w ← w + η_g mean(v_k − w_t)``, ``c ← c + (1/N) Σ_{k∈S} (c_k⁺ − c_k)``  (line 17)

Both sides compute with ``x_k = c_k⁺ − c_k + c``. With option 2 it is ``(w_t − v_k)/(K_k η)``, the mean of
the client's corrected gradients. The server knows w_t, v_k and K_k, so nothing travels beside the model. A
client uploads x_k with option 1. It also does where the server does not get v_k: a later term changes the
update (compression), or it travels in half precision. The update of c is then
``c ← c + |S|/N (mean x_k − c)``, N the population, S the replies that are used.

A client's c_k⁺ counts only if the server used its reply. So ``c = Σ_k c_k / N`` whoever drops out. It fails
if a client loses its c_k: it begins at 0, and its old share stays in c. The history names that client.
Where N is not known before, it is the number of clients so far: c shrinks as new ones come.
With a robust aggregator, c follows its aggregate of the x_k. Where it selects clients, they alone count.

``state="server"`` is ours: the server keeps the table of all c_k (N models), and clients keep nothing.

Option 2 needs clients with plain SGD. Momentum, Adam and clipping change what ``(w_t − v_k)/(K_k η)`` is.
All are refused with option 2, in a training loop of your own too. SGD's weight decay is part of the
gradient: with it, this is SCAFFOLD on the L2-regularised loss. Option 1 goes with any optimiser.

Source: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic controlled averaging for
federated learning" (2020), Alg. 1. Its server averages the clients alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
import torch

from flwr_regs.abilities import Addresses, Checks
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.sgd import CountsOnSGD
from flwr_regs.methods.parts.uploads import Sums, check_like, grown, kept, under, wide
from flwr_regs.methods.server_step.fedopt import TorchServerOptimizer
from flwr_regs.term import POSITIVE, Range, Ranges, Term, one_of, plain_number
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import LARGEST, check_finite

__all__ = ["SCAFFOLD", "ControlVariates", "SCAFFOLDClient"]


@dataclass(frozen=True)
class ControlVariates(CountsOnSGD, Sums, Addresses, Checks):
    """SCAFFOLD's correction ``c − c_k`` of each gradient (Alg. 1).

    Parameters
    ----------
    option : {1, 2}
        How a client makes its next c_k: from the gradient over all its data at ``w_t``, or from the steps
        that it took.
    state : {"client", "server"}
        Who keeps c_k: each client its own, or the server all of them.
    """

    name: ClassVar[str] = "scaffold"
    keeps_delta: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    counts_on_sgd: ClassVar[str] = (
        "SCAFFOLD's option 2 derives a client's control variate from its steps of plain SGD, but {}: leave "
        "it out, or give the strategy option=1"
    )
    ranges: ClassVar[Ranges] = {
        "option": Range("1 or 2", lambda v: v in (1, 2), Integral),
        "state": one_of("client", "server"),
    }
    option: int = 2
    state: str = "client"

    def acts(self, hook: str) -> bool:
        return super().acts(hook) and (self.option == 2 or hook != "client_optimizer")

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        return under(server, "c.") if self.state == "client" else {}

    def broadcast_to(self, pid: int, server: Slot, ctx: ServerContext) -> Slot:
        if self.state == "client":
            return {}
        # by name: the slot holds every client's c_k
        c = {n: server[f"c.{n}"] for n in ctx.params if f"c.{n}" in server}
        return {n: a - server.get(f"c{pid}.{n}", 0) for n, a in c.items()}  # c − c_k

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        c, c_k = ctx.broadcast, ctx.client
        return {n: (g - c_k.get(n, 0.0)).add_(c.get(n, 0.0)) for n, g in grads.items()}  # line 11

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        # c − c_k; what is missing is 0
        correction = {n: ctx.broadcast.get(n, 0.0) - ctx.client.get(n, 0.0) for n in delta}
        if self.option == 1:
            full = ctx.mean_gradient(ctx.start)
            x = {n: full[n] + c for n, c in correction.items()}
        else:
            x = {n: -wide(d) / (ctx.num_steps * ctx.lr) for n, d in delta.items()}
        next_c = {n: a - correction[n] for n, a in x.items()}  # c_k⁺, line 13
        derived = self.option == 2 and ctx.delta_is_sent and keys.HALF_KEY not in ctx.config
        return delta, {} if derived else x, {} if self.state == "server" else next_c

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        if self.option == 1 or upload:
            check_like(params, upload)

    def addends(self, pid: int, delta: Arrays, upload: Slot, ctx: ServerContext) -> Slot:
        if upload:
            x = {n: upload[n] for n in delta}
        else:
            x = {n: d / -(ctx.replies[pid].num_steps * ctx.lr) for n, d in delta.items()}
        check_finite(x, "its change for each step", largest=LARGEST)
        of_all = {f"c.{n}": a for n, a in x.items()}
        return of_all | {f"c{pid}.{n}": a for n, a in x.items() if self.state == "server"}

    def adds(self, key: str) -> bool:
        return key.startswith("c.")

    def update(self, server: Slot, delta: Arrays, uploads: Slot, ctx: ServerContext) -> ServerStep:
        new, shrunk = {**server, "clients": np.array(ctx.population)}, grown(server, ctx)
        for key, x in uploads.items():
            name = key.partition(".")[2]
            c = server.get(f"c.{name}", 0.0)
            if self.adds(key):  # line 17
                # an aggregator that selects clients gives n times their mean
                change = ctx.counted / ctx.population * (x / len(ctx.weights) - c)
                c_new = shrunk * c + change
            else:
                c_new = server.get(key, 0.0) + (x - c)  # c_k⁺
            new[key] = kept(c_new, ctx.params[name])
        return new, delta


def scaled(server_lr: float) -> list[Term]:
    """Return the term that multiplies the server's step by η_g (line 16); none for 1."""
    server_lr = plain_number(server_lr)
    POSITIVE.check("SCAFFOLD", "server_lr", server_lr)
    make = partial(torch.optim.SGD, lr=server_lr)
    return [] if server_lr == 1 else [TorchServerOptimizer(make)]


class SCAFFOLD(MethodStrategy):
    """Stochastic controlled averaging: control variates against client drift (Alg. 1).

    Parameters
    ----------
    server_lr : float
        η_g > 0, the server's step size.
    option, state : int, str
        See :class:`ControlVariates`.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights. The control variates always count alike.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self,
        server_lr: float = 1.0,
        option: int = 2,
        state: str = "client",
        *,
        weighting: str = "uniform",
        **kwargs: Any,
    ) -> None:
        terms = [ControlVariates(option, state), *scaled(server_lr)]
        super().__init__(terms, weighting=weighting, **kwargs)


class SCAFFOLDClient(MethodClient):
    """The client of :class:`SCAFFOLD`."""

    terms = (ControlVariates,)
