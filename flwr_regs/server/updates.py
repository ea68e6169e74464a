"""The clients' updates, ``v_k − w_t`` in float64, read block by block from what the clients sent.

Nothing of a model's size is made: a block of ``w_t`` and one of ``v_k`` are widened, and subtracted in
place. What came in half precision is widened block by block too, and an update that came in a method's
code is decoded for one client at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flwr_regs.term import Slot
from flwr_regs.wire.arrays import all_finite
from flwr_regs.wire.blocks import BLOCK, blocks, flat, order_of
from flwr_regs.wire.precision import Widened

SMALL = 1 << 12
"""Coordinates that lie near enough in memory."""


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
    coded : callable, optional
        Decodes `delta`, which is then empty: :attr:`open` returns the reply with it.
    """

    arrays: Mapping[str, np.ndarray]
    uploads: Slot
    metrics: Any
    num_examples: float
    delta: Mapping[str, np.ndarray] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    coded: Callable[[], Mapping[str, np.ndarray]] | None = None

    @property
    def open(self) -> Reply:
        """The reply with its update decoded, which takes a model's memory as long as it is held."""
        return self if self.coded is None else replace(self, delta=self.coded(), coded=None)


class Moves:
    """What the clients make of one array: ``v_k − w_t``, as vectors in float64.

    Parameters
    ----------
    name : str
    w : array
        ``w_t``. An infinite constant in it (a mask) is the same everywhere, and counts as 0.
    replies : mapping of int to Reply
        By partition id, none of them coded. Who did not send the array did not move it.
    order : {"C", "F"}
        The order of the vectors' coordinates.

    Attributes
    ----------
    name : str
    senders : list of int
        The clients that sent the array, in the order of `replies`.
    """

    def __init__(
        self, name: str, w: np.ndarray, replies: Mapping[int, Reply], order: Any = "C"
    ) -> None:
        self.name = name
        self._w = flat(w, order)
        self._clean = all_finite(w)
        self._sent: dict[int, tuple[np.ndarray, Callable[..., np.ndarray] | None, bool]] = {}
        for pid, reply in replies.items():
            if name in reply.delta:
                self._sent[pid] = (flat(reply.delta[name], order), None, True)
            elif name in reply.arrays:
                raw, widen = _as_sent(reply.arrays, name)
                self._sent[pid] = (flat(raw, order), widen, False)
        self.senders = list(self._sent)
        self._at = slice(0, 0)
        self._wide = np.zeros(0)

    def read(self, pid: int, part: slice, out: np.ndarray) -> None:
        """Write some coordinates of one client's ``v_k − w_t`` into `out`; zeros if it sent none."""
        if pid not in self._sent:
            out.fill(0.0)
            return
        sent, widen, moved = self._sent[pid]
        near = sent[part]
        if near.size > SMALL:  # to read far memory and to widen it at once takes half as long again
            near = near.copy()
        out[...] = near if widen is None else widen(near)
        if moved:
            return
        if not self._clean:
            out[~np.isfinite(out)] = 0.0
        np.subtract(out, self._base(part), out=out)

    def _base(self, part: slice) -> np.ndarray:
        """Return a block of ``w_t`` in float64, kept until another is read."""
        if part != self._at:
            self._wide = self._w[part].astype(np.float64)
            if not self._clean:
                self._wide[~np.isfinite(self._wide)] = 0.0
            self._at = part
        return self._wide


def _as_sent(
    arrays: Mapping[str, np.ndarray], name: str
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray] | None]:
    """Return an array as it travelled, and what widens it; None if it did not travel in 16 bits."""
    return arrays.raw(name) if isinstance(arrays, Widened) else (arrays[name], None)


class Sums:
    """``Σ ω_k (v_k − w_t)`` of each array, added up in the order of the replies and in float64.

    Parameters
    ----------
    base : mapping of str to array
        ``w_t``.
    by : mapping of str to mapping of int to float
        Array -> the weights of the clients, by partition id.
    """

    def __init__(
        self, base: Mapping[str, np.ndarray], by: Mapping[str, Mapping[int, float]]
    ) -> None:
        self._base = base
        self._by = by
        width = min(BLOCK, max((w.size for w in base.values()), default=0))
        self._total, self._x = np.empty(width), np.empty(width)

    def of(self, replies: Mapping[int, Reply]) -> dict[str, np.ndarray]:
        """Return the sums by name: floats in their own dtype, integers and booleans in float64."""
        if any(r.coded is not None for r in replies.values()):
            return self._client_by_client(replies)
        out = {}
        for name, w in self._base.items():
            order = order_of(w)
            moves = Moves(name, w, replies, order)
            sums = np.zeros(w.size, _result(w))
            for part in blocks(w.size) if moves.senders else ():
                total = self._total[: part.stop - part.start]
                total.fill(0.0)
                self._add(moves, moves.senders, name, part, total)
                sums[part] = total
            out[name] = sums.reshape(w.shape, order=order)
        return out

    def _client_by_client(self, replies: Mapping[int, Reply]) -> dict[str, np.ndarray]:
        """Return the same sums, and decode each client's update once: one at a time is held."""
        totals = {n: np.zeros(w.size) for n, w in self._base.items()}
        for pid, reply in replies.items():
            alone = {pid: reply.open}
            for name, w in self._base.items():
                moves = Moves(name, w, alone, order_of(w))
                for part in blocks(w.size) if moves.senders else ():
                    self._add(moves, moves.senders, name, part, totals[name][part])
            del alone, moves
        return {
            n: totals.pop(n).astype(_result(w), copy=False).reshape(w.shape, order=order_of(w))
            for n, w in self._base.items()
        }

    def _add(
        self, moves: Moves, pids: Iterable[int], name: str, part: slice, total: np.ndarray
    ) -> None:
        x, by = self._x[: total.size], self._by[name]
        for pid in pids:
            moves.read(pid, part, x)
            np.multiply(x, by[pid], out=x)
            np.add(total, x, out=total)


def _result(w: np.ndarray) -> np.dtype[Any]:
    """The dtype of an array's mean: its own, or float64, since a mean of integers need not be whole."""
    return w.dtype if w.dtype.kind == "f" else np.dtype(np.float64)


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
    return Sums(base, {n: weights if n in fixed else scaled for n in base}).of(replies)


def update_of(
    reply: Reply, base: Mapping[str, np.ndarray], fixed: Collection[str]
) -> dict[str, np.ndarray]:
    """Return one client's ``v_k − w_t`` of the trained arrays, in float64."""
    alone, out = {0: reply.open}, {}
    for name, w in base.items():
        if name not in fixed:
            order = order_of(w)
            moves, update = Moves(name, w, alone, order), np.empty(w.size)
            for part in blocks(w.size):
                moves.read(0, part, update[part])
            out[name] = update.reshape(w.shape, order=order)
    return out


def update_norm(reply: Reply, base: Mapping[str, np.ndarray], fixed: Collection[str]) -> float:
    """Return ``‖v_k − w_t‖`` over all trained arrays as one vector."""
    alone, total = {0: reply.open}, 0.0
    for name, w in base.items():
        if name not in fixed:
            moves, x = Moves(name, w, alone, order_of(w)), np.empty(min(w.size, BLOCK))
            for part in blocks(w.size):
                y = x[: part.stop - part.start]
                moves.read(0, part, y)
                total += float(np.vdot(y, y))
    return float(np.sqrt(total))
