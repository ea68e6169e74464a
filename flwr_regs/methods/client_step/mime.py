"""Mime and MimeLite: clients step with the server's momentum, which stands still in a round.

| *Init*       ``m = 0``
| *Probe*      only Mime; down: ``w_t`` and m; up: ``∇F_k(w_t)``, over all the client's data
| *Broadcast*  only Mime: ``c = mean ∇F_k(w_t)``, over the clients that replied to the probe. MimeLite:
|              ``w_t`` and m. In round 1 there is no m
| *Step*       ``v ← v − η ((1−β) g + β m)``; Mime: ``g = ∇f_k(v) − ∇f_k(w_t) + c``, both gradients on the
|              same batch with the same dropout mask; MimeLite: ``g = ∇f_k(v)``
| *Upload*     ``v_k``; only MimeLite: ``∇F_k(w_t)``
| *Update*     ``w ← mean v_k``, ``m ← (1−β) c + β m``; MimeLite: ``c = mean ∇F_k(w_t)``, over the replies
|              that are used

This is Alg. 1 with SGD with momentum as the base algorithm: ``U(g, m) = V(g, m) = (1−β) g + β m``. With
β = 0, MimeLite is FedAvg and sends nothing beside the model; Mime keeps its correction.

Mime's c is this round's, and m moves by the c that the clients were sent. A client that drops out between
the two exchanges stays in it. `weighting` weighs the full gradients in c as it weighs the models: with
"num-examples", c is ``Σ p_k ∇F_k(w_t)``, the gradient of the loss over all their data.

Clients run plain SGD: with momentum, Adam or weight decay a step would not be the base algorithm's, and is
refused. Clipping is not: it bounds the whole step. Full gradients are in eval mode, with the buffers of
``w_t``. BatchNorm's batch statistics in the steps are then no part of c: in the mean over batches, Mime's
correction does not cancel there.

A term on the left of Mime changes the objective whose gradient is corrected, but c is that of the plain
loss. What such a term adds at ``w_t`` itself cancels; FedProx and FedFOR add nothing there. Of entries that
stay on the client (FedBN), MimeLite's full gradient sees the trained values, because it is computed after
the steps.

Source: Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the centralized barrier for
cross-device federated learning" (2021), Alg. 1; also known as "Mime: mimicking centralized stochastic
algorithms in federated learning". Its server averages the clients alike, so ``weighting`` is "uniform".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flwr_regs.abilities import Agrees, Checks, Probes, Steers
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.sgd import PLAIN, unlike_sgd
from flwr_regs.methods.parts.uploads import Sums, check_like, kept, under, unlike_most
from flwr_regs.term import DECAY, Ranges, Term

__all__ = ["CorrectedMomentum", "FixedMomentum", "Mime", "MimeClient", "MimeLite", "MimeLiteClient"]


class _ServerMomentum(Term, Checks, Steers):
    """The part that both terms share: the server's m, the clients' step with it, the check of uploads."""

    keeps_delta: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"beta": DECAY}
    beta: float

    def client_optimizer(self, optimizer: Callable[..., Any]) -> Callable[..., Any]:
        acts = self.acts("client_optimizer")
        if acts and (what := unlike_sgd(optimizer, (*PLAIN, "weight_decay"))):
            why = f"by plain SGD, but {what} may take other steps: leave it out"
            raise ValueError(f"Mime's clients take the server's steps, {why}")
        return optimizer

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        return server  # m

    def _step(self, grads: Arrays, slot: Slot) -> Arrays:
        """Return ``U(g, m) = V(g, m) = (1−β) g + β m``."""
        b, m = self.beta, under(slot, "m.")
        return {n: (1 - b) * g + b * m.get(n, 0.0) for n, g in grads.items()}

    def _moved(self, server: Slot, c: Arrays, ctx: ServerContext) -> Slot:
        """Return the next m, given this round's c."""
        return {f"m.{n}": kept(m, ctx.params[n]) for n, m in self._step(c, server).items()}

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        check_like(params, upload)


@dataclass(frozen=True)
class FixedMomentum(_ServerMomentum, Sums):
    """MimeLite's steps with the server's momentum (Alg. 1).

    Parameters
    ----------
    beta : float
        The momentum β, in [0, 1); 0 changes nothing.
    """

    name: ClassVar[str] = "mime-lite"
    elementwise: ClassVar[bool] = True
    excludes: ClassVar[tuple[str, ...]] = ("mime",)
    beta: float

    def acts(self, hook: str) -> bool:
        return super().acts(hook) and self.beta > 0

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return self._step(grads, ctx.broadcast)

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, ctx.mean_gradient(ctx.start) if self.beta else {}, {}

    def addends(self, pid: int, delta: Arrays, upload: Slot, ctx: ServerContext) -> Slot:
        share = 1.0 if ctx.robust else ctx.weights[pid]  # what is robust counts clients alike
        return {n: share * np.asarray(g, dtype=np.float64) for n, g in upload.items()}

    def update(self, server: Slot, delta: Arrays, uploads: Slot, ctx: ServerContext) -> ServerStep:
        clients = len(ctx.weights) if ctx.robust else 1
        c = {n: total / clients for n, total in uploads.items()}
        return self._moved(server, c, ctx), delta


@dataclass(frozen=True)
class CorrectedMomentum(_ServerMomentum, Probes, Agrees):
    """Mime's steps: the server's momentum, and gradients corrected by the cohort's mean (Alg. 1).

    Parameters
    ----------
    beta : float
        The momentum β, in [0, 1); 0 leaves the correction.
    """

    name: ClassVar[str] = "mime"
    robust: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("mime-lite", "scaffold", "feddyn", "gradient-tracking"),
        "each corrects the same drift or has the same momentum, which would count twice: keep one",
    )
    beta: float

    def probe(self, ctx: ClientContext) -> tuple[Slot, Slot]:
        return ctx.mean_gradient(ctx.start), {}

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        # The first probe is before the server knows which parameters are frozen or tied.
        known = {n: p for n, p in params.items() if n in upload}
        check_like(known or params, upload)

    def agree(self, uploads: Mapping[int, Slot]) -> dict[int, str]:
        return unlike_most({pid: sorted(u) for pid, u in uploads.items()}, "gradients of {}", len)

    def answer(self, probes: Mapping[int, Slot]) -> dict[int, Slot]:
        alike = dict.fromkeys(probes, 1 / max(len(probes), 1))
        return self.answer_in(probes, ServerContext(1, 1.0, weights=alike))

    def answer_in(self, probes: Mapping[int, Slot], ctx: ServerContext) -> dict[int, Slot]:
        mean = ctx.aggregated(probes) if ctx.robust else _mean(probes, ctx.weights)
        return {pid: {f"c.{n}": a for n, a in mean.items()} for pid in probes}

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        c = under(ctx.broadcast, "c.")
        if missing := [n for n in grads if n not in c]:
            raise ValueError(f"the round's first exchange brought no mean gradient of {missing}")
        there = ctx.gradient_at(ctx.start)
        return self._step({n: g - there[n] + c[n] for n, g in grads.items()}, ctx.broadcast)

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> ServerStep:
        if not self.beta:
            return server, delta
        sent = next(iter(ctx.answers.values()))  # the same to all
        c = {n: np.asarray(sent[f"c.{n}"], dtype=np.float64) for n in ctx.params}
        return self._moved(server, c, ctx), delta


def _mean(probes: Mapping[int, Slot], weights: Mapping[int, float]) -> Arrays:
    """Return ``c = Σ p_k ∇F_k(w_t)``, summed in float64, in the gradients' dtypes."""
    mean: Arrays = {}
    for n, like in next(iter(probes.values()), {}).items():
        total = sum(weights[pid] * np.asarray(g[n], np.float64) for pid, g in probes.items())
        mean[n] = np.asarray(total, dtype=like.dtype)
    return mean


class Mime(MethodStrategy):
    """Clients that take the steps of a centralised momentum method (Alg. 1).

    Parameters
    ----------
    beta : float
        See :class:`CorrectedMomentum`.
    weighting : {"uniform", "num-examples"}
        Of the models, and of the full gradients in c. The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, beta: float = 0.9, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([CorrectedMomentum(beta)], weighting=weighting, **kwargs)


class MimeClient(MethodClient):
    """The client of :class:`Mime`."""

    terms = (CorrectedMomentum,)


class MimeLite(MethodStrategy):
    """Clients that step with the server's momentum, which stands still in a round (Alg. 1).

    Parameters
    ----------
    beta : float
        See :class:`FixedMomentum`.
    weighting : {"uniform", "num-examples"}
        Of the models, and of the full gradients in c. The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, beta: float = 0.9, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([FixedMomentum(beta)], weighting=weighting, **kwargs)


class MimeLiteClient(MethodClient):
    """The client of :class:`MimeLite`."""

    terms = (FixedMomentum,)
