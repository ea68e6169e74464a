"""What each reply weighs, and what the server measures of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import numpy as np

from flwr_regs.abilities import Weighs
from flwr_regs.server.aggregate.updates import update_of
from flwr_regs.server.failures import Passing, UnusableReplies, of_usable
from flwr_regs.server.round import Numbers, Replied, Reply, Slots
from flwr_regs.term import ServerContext, Term
from flwr_regs.wire.arrays import LARGEST, square_sum
from flwr_regs.wire.errors import described

_METRICS = "the metrics 'local-steps' (taken) and 'planned-steps'"
STEPS = f"a client reports {_METRICS} where train_config asks for 'local-epochs' or 'local-steps'"

ROUNDING = 1e-12
"""Relative difference of two weights below which they are the same."""


def aggregation_weights(replies: Replied, weighting: str, most: float | None = None) -> Numbers:
    """Return ``p_k``; they sum to one over the used replies.

    ``n_k / Σ n`` for ``"num-examples"``, ``1/|S_t|`` for ``"uniform"``; then :func:`cut_weights`.
    """
    by_examples = weighting == "num-examples"
    raw = {k: r.num_examples if by_examples else float(r.turns) for k, r in replies.items()}
    total = sum(raw.values())
    weights = {k: v / total for k, v in raw.items()}
    return weights if most is None else cut_weights(weights, most)


def cut_weights(weights: Numbers, most: float) -> Numbers:
    """Return weights of which none is above `most`; they keep their sum of 1.

    What is cut off goes to the others in proportion to theirs, again and again until none is above. If
    that is impossible, all are equal.
    """
    if most * len(weights) <= 1:
        return dict.fromkeys(weights, 1 / len(weights))
    new, full = weights, set[int]()
    while above := {k for k, p in new.items() if p > most and k not in full}:
        full |= above
        rest = sum(p for k, p in weights.items() if k not in full)
        left = 1 - most * len(full)
        new = {k: most if k in full else p * (left / rest) for k, p in weights.items()}
    return new


def bounded_shares(weights: Numbers, most: float | None) -> Numbers:
    """Return ``ω_k`` of which none is above the share `most` of their sum; those below stay as they are."""
    positive = {k: w for k, w in weights.items() if w > 0}
    if most is None or not positive:
        return weights
    total = sum(positive.values())
    shares = cut_weights({k: w / total for k, w in positive.items()}, most)
    unit = min(positive[k] / share for k, share in shares.items())  # of one that was not cut
    bounds = {k: unit * share for k, share in shares.items()}
    # those that are below by rounding alone were not cut
    return {**weights, **{k: w for k, w in bounds.items() if w < positive[k] * (1 - ROUNDING)}}


@dataclass(frozen=True)
class Stats:
    """What the server measured of one reply: see :class:`flwr_regs.hook_contexts.ReplyStats`."""

    _pid: int
    _reply: Reply
    _base: Mapping[str, np.ndarray]
    _fixed: Collection[str]

    @property
    def num_examples(self) -> float:
        return self._reply.num_examples

    @property
    def num_steps(self) -> int:
        return self._steps()[0]

    @property
    def planned_steps(self) -> int:
        return self._steps()[1]

    def _steps(self) -> tuple[int, int]:
        why = f"it reports no steps, which the method reads; {STEPS}"
        return self._reply.steps or self._unusable(why)

    @property
    def loss(self) -> float:
        loss = self._reply.metrics.get("train-loss")
        if not isinstance(loss, int | float) or not abs(loss) <= LARGEST:
            self._unusable(f"its train-loss is {loss!r:.40}, which the method reads")
        return float(loss)

    def _unusable(self, why: str) -> NoReturn:
        raise UnusableReplies({self._pid: why})

    @cached_property
    def norm(self) -> float:
        update = update_of(self._reply, self._base, self._fixed)  # as one vector
        return math.sqrt(sum(map(square_sum, update.values())))


@dataclass(frozen=True)
class StepScaling(Term, Weighs):
    """``incomplete="scale"``: a client that took ``s_k`` of its E steps weighs ``E / s_k`` times as much.

    At most `max_scale` times. Source: EFL (2021), Sec. 4.2.
    """

    name: ClassVar[str] = "step-scaling"
    bounds_steps: ClassVar[bool] = True

    def weigh(self, weights: Numbers, uploads: Slots, ctx: ServerContext) -> dict[int, float]:
        scale = {k: r.planned_steps / r.num_steps for k, r in ctx.replies.items()}
        return {k: p * min(scale[k], ctx.max_scale) for k, p in weights.items()}  # p_k^τ


class WithheldStats(Mapping[int, Stats]):
    """In place of the replies' measures under privacy: they get no noise."""

    def __getitem__(self, pid: object = None) -> NoReturn:
        what = "ctx.replies, what was measured of single replies, which gets no noise"
        raise ValueError(f"privacy=CentralDP(...): a term reads {what}; leave it out")

    __iter__ = __len__ = __getitem__


def update_weights(weigher: Any, replies: Replied, ctx: ServerContext) -> Numbers:
    """Return ``ω_k`` by partition id; ``p_k`` without a weigher, which is a term that `Weighs`.

    Raises UnusableReplies for replies without which `weigh` works, and ValueError if it never does.
    """
    if weigher is None:
        return ctx.weights

    def weigh(pids: Collection[int]) -> dict[int, float]:
        some = restricted(ctx, pids)
        uploads = {p: replies[p].uploads.get(weigher.name, {}) for p in pids}
        scaled = weigher.weigh(some.weights, uploads, some)
        if not isinstance(scaled, Mapping) or set(scaled) != set(pids):
            raise TypeError(f"expected a weight for each of {sorted(pids)}, not {scaled!r:.200}")
        numbers = {p: float(scaled[p]) for p in pids}
        if wrong := {p: w for p, w in numbers.items() if not abs(w) <= LARGEST}:
            raise TypeError(f"the weights {wrong} are no usable numbers")
        return numbers

    why = f"weigh of '{weigher.name}' fails"
    try:
        return of_usable(replies, weigh, why)
    except Passing:
        raise
    except Exception as error:
        raise ValueError(f"{why}: {described(error)}") from error


def restricted(ctx: ServerContext, pids: Collection[int]) -> ServerContext:
    """Return the context of a round in which only these clients' replies are used."""
    if len(pids) == len(ctx.weights):
        return ctx
    total = sum(ctx.weights[p] for p in pids)
    weights = {p: ctx.weights[p] / total for p in pids}
    measured = {p: r for p, r in ctx.replies.items() if p in pids}
    return replace(ctx, weights=weights, replies=measured)
