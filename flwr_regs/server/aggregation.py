"""Averaging the clients' models, in a fixed order and in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from flwr_regs.abilities import Weighs
from flwr_regs.term import ServerContext, Slot, Term
from flwr_regs.wire.arrays import LARGEST
from flwr_regs.wire.errors import described

STEPS = (
    "a client reports the metrics 'local-steps' (taken) and 'planned-steps' where train_config asks for "
    "'local-epochs' or 'local-steps'"
)


@dataclass(frozen=True)
class Reply:
    """One client's usable reply.

    Attributes
    ----------
    arrays : mapping
        ``v_k`` by name; an array that is neither here nor in `delta` equals that of ``w_t``.
    uploads : Slot
        The terms' uploads by term name; those of a term that folds are decoded when they are read.
    metrics : mapping
    num_examples : float
        ``n_k``.
    delta : mapping
        ``v_k − w_t`` of the arrays that were sent as differences.
    steps : tuple or None
        ``s_k`` and E, the local steps taken and planned; None if the client does not report them.
    tied : mapping
        Tied weights, other name -> trained name.
    """

    arrays: Mapping[str, np.ndarray]
    uploads: Slot
    metrics: Any
    num_examples: float
    delta: Mapping[str, np.ndarray] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    tied: Mapping[str, str] = field(default_factory=dict)


def aggregation_weights(
    replies: Mapping[int, Reply], weighting: str, most: float | None = None
) -> dict[int, float]:
    """Return ``p_k`` by partition id; they sum to one over the used replies.

    ``n_k / Σ n`` for ``"num-examples"``, ``1/|S_t|`` for ``"uniform"``; then :func:`cut_weights`.
    """
    raw = {k: r.num_examples if weighting == "num-examples" else 1.0 for k, r in replies.items()}
    total = sum(raw.values())
    weights = {k: v / total for k, v in raw.items()}
    return weights if most is None else cut_weights(weights, most)


def cut_weights(weights: Mapping[int, float], most: float) -> dict[int, float]:
    """Return weights of which none is above `most`; they keep their sum of 1.

    What is cut off goes to the others in proportion to theirs, again and again until none is above. If
    that is impossible, all are equal.
    """
    if most * len(weights) <= 1:
        return dict.fromkeys(weights, 1 / len(weights))
    new, full = dict(weights), set[int]()
    while above := {k for k, p in new.items() if p > most and k not in full}:
        full |= above
        rest = sum(weights[k] for k in weights if k not in full)
        left = 1 - most * len(full)
        new = {k: most if k in full else p * (left / rest) for k, p in weights.items()}
    return new


class UnusableReplies(Exception):
    """Replies that a term cannot work with: partition id -> why."""

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__(dict(why))
        self.why = dict(why)


@dataclass(frozen=True)
class Stats:
    """What the server measured of one reply: see :class:`flwr_regs.term.ReplyStats`."""

    _pid: int
    _reply: Reply
    _base: Mapping[str, np.ndarray]
    _fixed: Collection[str]

    @property
    def num_examples(self) -> float:
        return self._reply.num_examples

    @property
    def num_steps(self) -> int:
        return self._steps[0]

    @property
    def planned_steps(self) -> int:
        return self._steps[1]

    @property
    def _steps(self) -> tuple[int, int]:
        if self._reply.steps is None:
            raise UnusableReplies(
                {self._pid: f"it reports no steps, which the method reads; {STEPS}"}
            )
        return self._reply.steps

    @property
    def loss(self) -> float:
        loss = self._reply.metrics.get("train-loss")
        if not isinstance(loss, int | float) or not abs(loss) <= LARGEST:
            raise UnusableReplies(
                {self._pid: f"its train-loss is {loss!r:.40}, which the method reads"}
            )
        return float(loss)

    @cached_property
    def norm(self) -> float:
        update = update_of(self._reply, self._base, self._fixed)
        return math.sqrt(sum(float(np.vdot(d, d)) for d in update.values()))


@dataclass(frozen=True)
class StepScaling(Term):
    """``incomplete="scale"``: a client that took ``s_k`` of its E steps weighs ``E / s_k`` times as much.

    Source: EFL (2021), Sec. 4.2.
    """

    name: ClassVar[str] = "step-scaling"

    def weigh(
        self, weights: Mapping[int, float], uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> dict[int, float]:
        r = ctx.replies
        return {k: p * r[k].planned_steps / r[k].num_steps for k, p in weights.items()}  # p_k^τ


class WithheldStats(Mapping[int, Stats]):
    """In place of the replies' measures under privacy: they get no noise."""

    def __getitem__(self, pid: int) -> Stats:
        raise ValueError(
            "privacy=CentralDP(...): a term reads ctx.replies, what was measured of single replies, which "
            "gets no noise; leave it out"
        )

    def __iter__(self) -> Iterator[int]:
        self[0]
        return iter(())

    def __len__(self) -> int:
        return len(list(self))


def update_weights(
    weigher: Weighs | None, name: str, replies: Mapping[int, Reply], ctx: ServerContext
) -> Mapping[int, float]:
    """Return ``ω_k`` by partition id; ``p_k`` without a weigher. `name` is the weigher's, for errors.

    Raises UnusableReplies for replies without which `weigh` works, and ValueError if it never does.
    """
    if weigher is None:
        return ctx.weights

    def weigh(pids: Collection[int]) -> dict[int, float]:
        total = sum(ctx.weights[p] for p in pids)
        part = {
            p: ctx.weights[p] / total if len(pids) < len(replies) else ctx.weights[p] for p in pids
        }
        uploads = {p: replies[p].uploads for p in pids}
        found = {p: r for p, r in ctx.replies.items() if p in pids}
        scaled = weigher.weigh(part, uploads, replace(ctx, weights=part, replies=found))
        if not isinstance(scaled, Mapping) or set(scaled) != set(pids):
            raise TypeError(
                f"expected a weight for each of the clients {sorted(pids)}, not {scaled!r:.200}"
            )
        numbers = {p: float(scaled[p]) for p in pids}
        if wrong := {p: w for p, w in numbers.items() if not abs(w) <= LARGEST}:
            raise TypeError(f"the weights {wrong} are no usable numbers")
        return numbers

    def fails(pids: Collection[int]) -> str:
        try:
            weigh(pids)
        except UnusableReplies:
            return ""  # names its client itself
        except Exception as error:
            return described(error)
        return ""

    try:
        return weigh(list(replies))
    except UnusableReplies:
        raise
    except Exception as error:
        why = f"weigh of '{name}' fails: {described(error)}"
        alone = {p: fails([p]) for p in replies}
        if all(alone.values()):  # for every reply: leave one out
            others = {p: [q for q in replies if q != p] for p in replies}
            alone = {p: why for p, rest in others.items() if rest and not fails(rest)}
        if culprits := {p: f"weigh of '{name}': {y}" for p, y in alone.items() if y}:
            raise UnusableReplies(culprits) from error
        raise ValueError(why) from error


MeanOfUpdates = Callable[
    [
        Mapping[str, np.ndarray],
        Mapping[int, Reply],
        Mapping[int, float],
        Mapping[int, float],
        Collection[str],
    ],
    dict[str, Any],
]
"""A mean of the replies: (model, replies, ``p_k``, ``ω_k``, names that are not trained) -> ``Δ``.

``Σ ω_k (v_k − w_t)`` for trained arrays, ``Σ p_k (v_k − w_t)`` for the others.
"""


def mean_delta(
    base: Mapping[str, np.ndarray],
    replies: Mapping[int, Reply],
    weights: Mapping[int, float],
    scaled: Mapping[int, float],
    fixed: Collection[str],
) -> dict[str, np.ndarray]:
    """Return the weighted sums of the updates: a `MeanOfUpdates`.

    Sums in the order of `replies` and in float64: the result does not depend on the order of arrival, and
    a small update is not lost beside a large weight. Floats come back in their own dtype, integers and
    booleans in float64 (their mean need not be whole).
    """
    out = {}
    for name, w in base.items():
        by = weights if name in fixed else scaled
        w64 = _finite(w)
        total = np.zeros_like(w64)
        for k, reply in replies.items():
            if name in reply.delta or name in reply.arrays:
                total += by[k] * _moved(reply, name, w64)
        out[name] = total.astype(w.dtype) if np.issubdtype(w.dtype, np.floating) else total
    return out


def update_of(
    reply: Reply, base: Mapping[str, np.ndarray], fixed: Collection[str]
) -> dict[str, np.ndarray]:
    """Return one client's ``v_k − w_t`` of the trained arrays, in float64."""
    out = {}
    for name, w in base.items():
        if name not in fixed:
            w64 = _finite(w)
            out[name] = _moved(reply, name, w64)
    return out


def difference(reply: Reply, name: str, w: np.ndarray, part: slice) -> np.ndarray:
    """Return some coordinates of one array's ``v_k − w_t``, taken as a vector, in float64."""
    return _moved(reply, name, _finite(w.reshape(-1)[part]), part)


def _moved(reply: Reply, name: str, w64: np.ndarray, part: slice | None = None) -> np.ndarray:
    """Return ``v_k − w_t`` of one array in float64, or of a `part` of it; zeros if none was sent."""

    def cut(array: np.ndarray) -> np.ndarray:
        return array if part is None else array.reshape(-1)[part]

    if name in reply.delta:
        return cut(reply.delta[name]).astype(np.float64)
    if name in reply.arrays:
        return np.asarray(_finite(cut(reply.arrays[name])) - w64)
    return np.zeros_like(w64)


def _finite(array: np.ndarray) -> np.ndarray:
    """Return an array in float64; an infinite constant (a mask) is the same everywhere, and becomes 0."""
    wide = array.astype(np.float64)
    wide[~np.isfinite(wide)] = 0.0
    return wide
