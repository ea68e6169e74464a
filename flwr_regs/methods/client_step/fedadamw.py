"""FedAdamW: clients run AdamW, whose second moments the server averages and hands on.

| *Init*       nothing
| *Broadcast*  ``w_t`` and, from round 2, the second moments ``v̄``, their step count T and
|              ``Δ̄ = w_t − w_{t−1}``
| *Step*       AdamW, begun with first moments 0, second moments v̄ and step count T; after each step
|              ``v ← v + γ Δ̄ / K_k``
| *Upload*     ``v_k``, its second moments, and its step count
| *Update*     ``w ← mean v_k``; v̄ and T are the means of what was uploaded

Both bias corrections use the run's step count, as torch's AdamW has one. In round 1, T and all moments are
0, and there is no Δ̄. ``K_k`` are the client's own planned steps, or its step budget if that is smaller;
under ``incomplete="scale"`` they are the planned ones. If all clients take K steps, T is ``(t − 1) K``.
Where they take unequally many, it is their mean, as v̄ is the mean of what so many steps have made. In both
all clients count alike, whatever the `weighting` of their models. A robust aggregator gets the moments as
one vector, and the step counts apart.

Clients that have no optimiser of their own run ``torch.optim.AdamW`` with torch's settings: weight decay
0.01, β 0.9 and 0.999, ε 1e-8. An AdamW of their own, or of the train config, keeps its settings. Another
optimiser is refused, and so is an ε that is 0 in the model's dtype, as 1e-8 is in float16. Parameters that
stay private (FedBN) begin each round with moments of 0 and no shift.

Departures: the paper sends one number of v̄ for each block of parameters, here all of v̄ travels; its first
moments are corrected by the round's own step count. The authors' code has both as here. Its shift has the
factor ``η_t/η_{t−1}``, which is 1 without a schedule.

Source: Liu et al., "FedAdamW: A communication-efficient optimizer with convergence and generalization
guarantees for federated large models" (2026). Its server averages the clients alike, so
``weighting`` is "uniform".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from flwr_regs.abilities import Carries, Checks, Steers
from flwr_regs.client.train.optimizer import Trial
from flwr_regs.methods.parts.last_step import steps_to_spread
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.sgd import PLAIN, unlike_sgd
from flwr_regs.methods.parts.uploads import Sums, check_arrays, joined, under, wide
from flwr_regs.term import NOT_NEGATIVE, Arrays, ClientContext, Ranges, ServerContext, Slot, Term

__all__ = ["FedAdamW", "FedAdamWClient", "SharedMoments"]


@dataclass(frozen=True)
class SharedMoments(Term, Carries, Steers, Sums, Checks):
    """AdamW on the clients, begun with the mean of their second moments; and a share of the last step.

    Parameters
    ----------
    gamma : float
        γ ≥ 0: over a round, a client repeats γ times the last global step.
    """

    name: ClassVar[str] = "fedadamw"
    keeps_delta: ClassVar[bool] = True
    keeps_update: ClassVar[bool] = True
    excludes: ClassVar[dict[str, str]] = dict.fromkeys(
        ("scaffold", "gradient-tracking", "fedadc", "fednova", "mime", "mime-lite"),
        "FedAdamW's clients run AdamW, but the other counts on steps of SGD: keep one",
    )
    ranges: ClassVar[Ranges] = {"gamma": NOT_NEGATIVE}
    gamma: float = 0.5

    def client_optimizer(self, optimizer: Callable[..., Any]) -> Callable[..., Any]:
        what = unlike_sgd(optimizer, (*PLAIN, "weight_decay", "amsgrad"))
        trial = optimizer(Trial([torch.zeros(1)]), lr=1.0)
        if what and (not isinstance(trial, torch.optim.AdamW) or trial.defaults["amsgrad"]):
            raise ValueError(
                f"FedAdamW's clients run AdamW without amsgrad, but {what} steps in another way: leave "
                "that out, or choose torch.optim.AdamW"
            )

        def make(params: Any, lr: float) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = (optimizer if what else torch.optim.AdamW)(params, lr=lr)
            eps, groups = made.defaults["eps"], made.param_groups
            kinds = {p.dtype for group in groups for p in group["params"]}
            given = torch.tensor(eps, dtype=torch.float64, device="cpu")
            if lost := [kind for kind in kinds if eps and not given.to(kind)]:
                raise ValueError(
                    f"AdamW's eps={eps:g} is 0 in the model's {lost[0]}, so that its steps may be "
                    "infinite: give the clients an AdamW with eps=1e-4"
                )
            made.register_step_post_hook(_shift)
            return made

        return make

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        last = ctx.previous_step or {}
        return server | {f"last.{n}": step.copy() for n, step in last.items()} if server else {}

    def optimizer_start(self, ctx: ClientContext) -> Arrays:
        if not ctx.broadcast:  # round 1
            return {}
        share = self.gamma / steps_to_spread(ctx)
        state: Arrays = {"step": ctx.broadcast["step"]}
        for n, w in ctx.start.items():
            zero = torch.zeros_like(w)  # and the state of what the others do not train
            state[f"exp_avg.{n}"] = zero
            state[f"exp_avg_sq.{n}"] = ctx.broadcast.get(f"exp_avg_sq.{n}", zero).to(w.dtype)
            state[f"shift.{n}"] = (share * ctx.broadcast.get(f"last.{n}", zero)).to(w.dtype)
        return state

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        state = under(ctx.optimizer_state, "exp_avg_sq.")
        v = {n: state[n].to(wide(d).dtype) for n, d in delta.items()}
        zero = [*v.values()][-1].new_zeros(())
        steps = zero + ctx.broadcast.get("step", 0) + ctx.num_steps
        return delta, {**joined(exp_avg_sq=v), "step": steps}, {}

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        shapes: dict[str, Any] = {f"exp_avg_sq.{n}": ("floats", p.shape) for n, p in params.items()}
        check_arrays(upload, {**shapes, "step": ("floats", ())})
        if negative := [key for key, a in upload.items() if (a < 0).any()]:
            raise ValueError(f"'{negative[0]}' is negative, expected squares and a step count")

    def addends(self, pid: int, delta: Arrays, upload: Slot, ctx: ServerContext) -> Slot:
        if not ctx.robust:
            return upload
        # the count is far larger than the moments: a bound on the length of both would bound it alone
        return {key if key != "step" else f"step.{pid}": a for key, a in upload.items()}

    def adds(self, key: str) -> bool:
        return not key.startswith("step.")

    def update(
        self, server: Slot, delta: Arrays, uploads: Slot, ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        mean = {key: a / len(ctx.weights) for key, a in uploads.items() if self.adds(key)}
        if ctx.robust:
            counts = under(uploads, "step.")
            mean |= ctx.aggregated({int(pid): {"step": a} for pid, a in counts.items()})
        wide = np.result_type(np.float32, *(w.dtype for w in ctx.params.values()))
        return {key: np.asarray(a, wide) for key, a in mean.items()}, delta


@torch.no_grad()
def _shift(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Add ``γ Δ̄ / K_k`` after a step."""
    for p, state in optimizer.state.items():
        if "shift" in state:
            p.add_(state["shift"])


class FedAdamW(MethodStrategy):
    """AdamW on the clients, with second moments that travel.

    Parameters
    ----------
    gamma : float
        See :class:`SharedMoments`. The authors' code has 0.5.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, gamma: float = 0.5, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([SharedMoments(gamma)], weighting=weighting, **kwargs)


class FedAdamWClient(MethodClient):
    """The client of :class:`FedAdamW`."""

    terms = (SharedMoments,)
