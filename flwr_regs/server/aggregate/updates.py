"""The clients' updates, ``v_k − w_t`` in float64, read from views of what the clients sent.

They are read in pieces, so that no array of a model's size is made beside the result. What came in half
precision is widened piece by piece too, and an update that came in a method's code is made whole for one
client at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from flwr_regs.server.round import Model, Replied, Reply
from flwr_regs.wire.arrays import NDArrays, all_finite, pieces
from flwr_regs.wire.parcel import Row
from flwr_regs.wire.precision import Widened

WHOLE = slice(None)
TOGETHER = 32
"""Clients whose pieces are read and summed at a time."""
OPENED = 2**20
"""Entries of updates that are made whole at a time, if one has no more."""


class Moves:
    """What the clients make of one array: ``v_k − w_t``, as vectors in float64.

    Parameters
    ----------
    name : str
    w : array
        ``w_t``. An infinite constant in it (a mask) is the same everywhere, and does not move.
    replies : mapping of int to Reply
        By partition id, none of them coded. Who did not send the array did not move it.

    Attributes
    ----------
    senders : list of int
        Who sent the array.
    """

    def __init__(self, name: str, w: np.ndarray, replies: Replied) -> None:
        self._w = w.reshape(-1)
        self._constant = None if all_finite(w) else ~np.isfinite(self._w)
        delta = {p: r.delta for p, r in replies.items() if name in r.delta}
        sent = {p: r.arrays for p, r in replies.items() if name in r.arrays and p not in delta}
        self.senders = [p for p in replies if p in delta or p in sent]
        self._delta = {p: d[name].reshape(-1) for p, d in delta.items()}
        self._rows = {p: a for p, a in sent.items() if isinstance(a, Row)}
        tables = {id(r.stack): r.stack[name] for r in self._rows.values()}
        self._tables = {stack: a.reshape(len(a), -1) for stack, a in tables.items()}
        self._sent = {p: _as_sent(a, name) for p, a in sent.items() if p not in self._rows}

    def read(self, pids: Sequence[int], part: slice = WHOLE) -> np.ndarray:
        """Return some coordinates of clients' ``v_k − w_t``, a row each; zeros if one sent none."""
        base = self._w[part].astype(np.float64)
        rows = np.empty((len(pids), base.size))
        stacks = [id(self._rows[p].stack) if p in self._rows else 0 for p in pids]
        with np.errstate(invalid="ignore"):  # inf − inf
            for stack, run in groupby(range(len(pids)), key=stacks.__getitem__):
                at = [*run]
                if stack:  # all rows of a stack at once
                    places = [self._rows[pids[i]].at for i in at]
                    out = rows[at[0] : at[-1] + 1]
                    np.subtract(self._tables[stack][places, part], base, out=out)
                    continue
                for i in at:
                    if (pid := pids[i]) in self._sent:
                        vector, widen = self._sent[pid]
                        np.subtract(widen(vector[part]), base, out=rows[i])
                    else:
                        rows[i] = self._delta[pid][part] if pid in self._delta else 0.0
        if self._constant is not None:
            rows[:, self._constant[part]] = 0.0
        return rows


def _as_sent(arrays: Model, name: str) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return an array as it travelled, as a vector, and what widens a part of it."""
    raw, widen = arrays.raw(name) if isinstance(arrays, Widened) else (arrays[name], np.asarray)
    return raw.reshape(-1), widen


@dataclass(frozen=True)
class Updates:
    """A round's replies, the model that they began from, and what each weighs.

    Attributes
    ----------
    base : mapping
        ``w_t`` as the clients got it.
    replies : mapping of int to Reply
        By partition id.
    weights, scaled : mapping of int to float
        ``p_k``, which weighs arrays that are not trained, and ``ω_k``, which weighs the trained ones.
    fixed : collection of str
        The names of the arrays that are not trained.
    """

    base: Model
    replies: Replied
    weights: Mapping[int, float]
    scaled: Mapping[int, float]
    fixed: Collection[str]

    @property
    def trained(self) -> list[str]:
        """The names of the trained arrays."""
        return [n for n in self.base if n not in self.fixed]


def mean_delta(updates: Updates, squares: dict[str, dict[int, float]] | None = None) -> NDArrays:
    """Return ``Σ ω_k (v_k − w_t)`` of trained arrays, and ``Σ p_k (v_k − w_t)`` of the others.

    Sums in float64 and in the order of the replies, so that the order of arrival does not matter and a
    small update is not lost beside a large weight. Floats come back in their own dtype, integers and
    booleans in float64, since their mean need not be whole.

    `squares`, if given, is filled in: array -> client -> the squared length of its ``v_k − w_t``.
    """
    base, replies = updates.base, updates.replies
    lengths = {} if squares is None else squares
    lengths |= {n: dict.fromkeys(replies, 0.0) for n in base}
    coded = any(r.coded is not None for r in replies.values())
    sums = {n: np.zeros(w.size, np.float64 if coded else summed_dtype(w)) for n, w in base.items()}
    # a coded update is made whole here, and forgotten before others are
    for group in _opened(base, replies) if coded else [replies]:
        for name, w in base.items():
            weights = updates.weights if name in updates.fixed else updates.scaled
            moves = Moves(name, w, group)
            for part in pieces(w.size):
                total = np.zeros(part.stop - part.start)
                for first in range(0, len(moves.senders), TOGETHER):
                    some = moves.senders[first : first + TOGETHER]
                    rows = moves.read(some, part)
                    total += np.einsum("k,kj->j", [weights[p] for p in some], rows)
                    of_each = np.einsum("kj,kj->k", rows, rows).tolist()
                    for pid, square in zip(some, of_each, strict=True):
                        lengths[name][pid] += square
                sums[name][part] += total
    return {n: in_shape(sums.pop(n), w) for n, w in base.items()}


def in_shape(total: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return a vector that was summed as the mean of an array: in its shape, and the dtype of its mean."""
    return total.astype(summed_dtype(w), copy=False).reshape(w.shape)


def summed_dtype(w: np.ndarray) -> np.dtype[Any]:
    """Return the dtype of an array's mean: its own, or float64 for integers and booleans."""
    return w.dtype if w.dtype.kind == "f" else np.dtype(np.float64)


def update_of(reply: Reply, base: Model, fixed: Collection[str]) -> NDArrays:
    """Return ``v_k − w_t`` of each trained array of a client, in float64."""
    return dict(each_update({0: reply}, base, fixed))[0]


def each_update(
    replies: Replied, base: Model, fixed: Collection[str]
) -> Iterator[tuple[int, NDArrays]]:
    """Yield each client's id and its :func:`update_of`; those of small models are read together."""
    for group in _opened(base, replies):
        rows = {n: Moves(n, w, group).read([*group]) for n, w in base.items() if n not in fixed}
        for k, pid in enumerate(group):
            yield pid, {n: moves[k].reshape(base[n].shape) for n, moves in rows.items()}


def _opened(base: Model, replies: Replied) -> Iterator[Replied]:
    """Yield the replies in their order, some at a time, with coded updates made whole."""
    pids = list(replies)
    step = max(1, min(TOGETHER, OPENED // max(sum(w.size for w in base.values()), 1)))
    for first in range(0, len(pids), step):
        yield {p: replies[p].open for p in pids[first : first + step]}
