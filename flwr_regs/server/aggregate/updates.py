"""The clients' updates, ``v_k − w_t`` in float64, read block by block from what the clients sent.

Nothing of a model's size is made: a block of ``w_t`` and one of ``v_k`` are widened, and subtracted in
place. What came in half precision is widened block by block too, and an update that came in a method's
code is decoded for one client at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flwr_regs.term import Slot
from flwr_regs.wire.arrays import all_finite
from flwr_regs.wire.blocks import BLOCK, blocks, flat, order_of, spread_over_threads, threads
from flwr_regs.wire.precision import Widened
from flwr_regs.wire.sparse import Sparse

ROWS = 10
"""Clients that are read at a time."""
NARROW, BESIDE = 1 << 13, 20
"""The least coordinates of a block; blocks of all threads together have one in so many of the model's."""
WIDE = 1 << 14
"""Coordinates of a block for which another thread pays: in narrower ones they wait for Python's lock."""


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
        ``v_k − w_t`` of the arrays that were sent as differences; those that are mostly zeros as `Sparse`.
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
    delta: Mapping[str, np.ndarray | Sparse] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    coded: Callable[[], Mapping[str, np.ndarray]] | None = None

    @property
    def open(self) -> Reply:
        """The reply with its update decoded, which takes a model's memory as long as it is held."""
        return self if self.coded is None else replace(self, delta=self.coded(), coded=None)


Widen = Callable[[np.ndarray], np.ndarray]
_Row = tuple[np.ndarray, Widen | None, bool]
"""An array as it was sent, ``(1, size)``; what widens it; and whether it is ``v_k``, not ``v_k − w_t``."""


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
        self._rows: dict[int, _Row] = {}
        self._sparse: dict[int, Sparse] = {}
        for pid, reply in replies.items():
            if name in reply.delta:
                sent = reply.delta[name]
                if isinstance(sent, Sparse) and order == "C":
                    self._sparse[pid] = sent
                else:
                    dense = sent.dense if isinstance(sent, Sparse) else sent
                    self._rows[pid] = flat(dense, order)[None], None, False
            elif name in reply.arrays:
                raw, widen = _as_sent(reply.arrays, name)
                self._rows[pid] = flat(raw, order)[None], widen, True
        self.senders = [pid for pid in replies if pid in self._rows or pid in self._sparse]

    def read(self, pids: Sequence[int], part: slice, out: np.ndarray) -> None:
        """Write some coordinates of clients' ``v_k − w_t``, a row each; zeros if one sent none."""
        rows = [self._rows[pid] for pid in pids if pid in self._rows]
        if len(rows) == len(pids) and len({row[1:] for row in rows}) == 1:  # few calls
            self._fill(rows, part, out)
            return
        for i, pid in enumerate(pids):
            if pid in self._rows:
                self._fill([self._rows[pid]], part, out[i : i + 1])
            elif pid in self._sparse:
                self._sparse[pid].read(part, out[i])
            else:
                out[i] = 0.0

    def update(self, pid: int, like: np.ndarray) -> np.ndarray:
        """Return all of a client's ``v_k − w_t``, in the shape of `like` and as it lies in memory."""
        update = np.empty(like.size)
        for part in blocks(like.size):
            self.read([pid], part, update[None, part])
        return update.reshape(like.shape, order=order_of(like))

    def _fill(self, rows: Sequence[_Row], part: slice, out: np.ndarray) -> None:
        """Read rows that are all of one kind."""
        _, widen, whole = rows[0]
        sent = [vector[:, part] for vector, *_ in rows]
        if widen is None:
            np.concatenate(sent, out=out)
        else:
            out[...] = widen(np.concatenate(sent))
        if not whole:
            return
        base = self._w[part].astype(np.float64)
        if not self._clean:
            base[~np.isfinite(base)] = 0.0
            out[~np.isfinite(out)] = 0.0
        np.subtract(out, base, out=out)


def _as_sent(arrays: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, Widen | None]:
    """Return an array as it travelled, and what widens it; None if it did not travel in 16 bits."""
    return arrays.raw(name) if isinstance(arrays, Widened) else (arrays[name], None)


class Sums:
    """``Σ ω_k (v_k − w_t)`` of each array, added up in the order of the replies and in float64.

    Parameters
    ----------
    base : mapping of str to array
        ``w_t``.
    replies : mapping of int to Reply
        By partition id.
    by : mapping of str to mapping of int to float
        Array -> the weights of the clients, by partition id.

    Attributes
    ----------
    width, threads : int
        Coordinates of a block; a reader reads at most so many at a time. Wide blocks need fewer calls, and
        more memory. So fewer threads read a small model.
    """

    def __init__(
        self,
        base: Mapping[str, np.ndarray],
        replies: Mapping[int, Reply],
        by: Mapping[str, Mapping[int, float]],
    ) -> None:
        self._base, self._replies, self._by = base, replies, by
        coded = any(r.coded is not None for r in replies.values())
        self._totals = self._client_by_client() if coded else {}
        kept = {} if coded else base
        self._moves = {n: Moves(n, w, replies, order_of(w)) for n, w in kept.items()}
        self._rows = min(ROWS, max((len(m.senders) for m in self._moves.values()), default=0))
        beside = sum(w.size for w in base.values()) // ((self._rows + 3) * BESIDE)
        self.threads, self.width = max(1, min(threads(), beside // WIDE)), BLOCK
        while self.width > NARROW and self.width * self.threads > beside:
            self.width //= 2

    def reader(self) -> Callable[[str, slice], np.ndarray]:
        """Return ``read(name, slice)``: some coordinates of a sum, of the vector in the array's own order.

        They are valid until the next call. Each thread needs a reader of its own.
        """
        width = min(self.width, max((w.size for w in self._base.values()), default=0))
        rows, total = np.empty((1 + self._rows, width)), np.empty(width)

        def read(name: str, part: slice) -> np.ndarray:
            if name in self._totals:
                return self._totals[name][part]
            moves, by, out = self._moves[name], self._by[name], total[: part.stop - part.start]
            if not moves.senders:
                out.fill(0.0)
            for first in range(0, len(moves.senders), ROWS):
                pids = moves.senders[first : first + ROWS]
                x, weights = rows[: 1 + len(pids), : out.size], [by[p] for p in pids]
                moves.read(pids, part, x[1:])
                if first:
                    x[0], weights = out, [1.0, *weights]
                np.einsum("k,kj->j", weights, x if first else x[1:], out=out)
            return out

        return read

    def whole(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return the sums by name: floats in their own dtype, integers and booleans in float64."""
        out = {n: np.zeros(self._base[n].size, _result(self._base[n])) for n in names}

        def worker() -> Callable[[tuple[str, slice]], None]:
            read = self.reader()

            def work(job: tuple[str, slice]) -> None:
                name, part = job
                out[name][part] = read(name, part)

            return work

        jobs = pieces({n: a.size for n, a in out.items()}, self.width)
        spread_over_threads(jobs, worker, self.threads)
        return {
            n: a.reshape(self._base[n].shape, order=order_of(self._base[n])) for n, a in out.items()
        }

    def _client_by_client(self) -> dict[str, np.ndarray]:
        """Return the sums as vectors in float64; each client's update is decoded once, one at a time."""
        totals = {n: np.zeros(w.size) for n, w in self._base.items()}
        for pid, reply in self._replies.items():
            alone = Sums(self._base, {pid: reply.open}, self._by)
            read = alone.reader()
            for name, total in totals.items():
                for part in blocks(total.size, alone.width):
                    total[part] += read(name, part)
            del alone, read
        return totals


def pieces(sizes: Mapping[str, int], width: int) -> list[tuple[str, slice]]:
    """Return all blocks of all arrays: (name, slice)."""
    return [(name, part) for name, size in sizes.items() for part in blocks(size, width)]


def _result(w: np.ndarray) -> np.dtype[Any]:
    """The dtype of an array's mean: its own, or float64, since a mean of integers need not be whole."""
    return w.dtype if w.dtype.kind == "f" else np.dtype(np.float64)


def sums_of(
    base: Mapping[str, np.ndarray],
    replies: Mapping[int, Reply],
    weights: Mapping[int, float],
    scaled: Mapping[int, float],
    fixed: Collection[str],
) -> Sums:
    """Return the weighted sums of the updates: `scaled` weighs trained arrays, `weights` the `fixed` ones.

    Sums in the order of `replies` and in float64: the result does not depend on the order of arrival, and
    a small update is not lost beside a large weight.
    """
    return Sums(base, replies, {n: weights if n in fixed else scaled for n in base})


def mean_delta(
    base: Mapping[str, np.ndarray],
    replies: Mapping[int, Reply],
    weights: Mapping[int, float],
    scaled: Mapping[int, float],
    fixed: Collection[str],
) -> dict[str, np.ndarray]:
    """Return all of :func:`sums_of`: a `MeanOfUpdates`.

    Floats come back in their own dtype, integers and booleans in float64 (their mean need not be whole).
    """
    return sums_of(base, replies, weights, scaled, fixed).whole(base)


def updates_of(
    replies: Mapping[int, Reply], base: Mapping[str, np.ndarray], fixed: Collection[str]
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield each client with its ``v_k − w_t`` of the trained arrays, in float64."""
    trained = {n: w for n, w in base.items() if n not in fixed}

    def moves_of(some: Mapping[int, Reply]) -> list[Moves]:
        return [Moves(n, w, some, order_of(w)) for n, w in trained.items()]

    together = moves_of({p: r for p, r in replies.items() if r.coded is None})
    for pid, reply in replies.items():  # a coded update is a model's memory: one at a time
        moves = together if reply.coded is None else moves_of({pid: reply.open})
        yield pid, {m.name: m.update(pid, trained[m.name]) for m in moves}


def update_norm(reply: Reply, base: Mapping[str, np.ndarray], fixed: Collection[str]) -> float:
    """Return ``‖v_k − w_t‖`` over all trained arrays as one vector."""
    alone, total = {0: reply.open}, 0.0
    for name, w in base.items():
        if name not in fixed:
            moves, x = Moves(name, w, alone, order_of(w)), np.empty((1, min(w.size, BLOCK)))
            for part in blocks(w.size):
                y = x[:, : part.stop - part.start]
                moves.read([0], part, y)
                total += float(np.vdot(y, y))
    return float(np.sqrt(total))
