"""One round's robust aggregation: of the updates, the buffers, and what the clients upload.

Everything that one client sends and that moves others goes through the strategy's aggregator:

- the **updates**, all trained parameters of a client as one vector;
- each **buffer** as a vector of its own;
- what a term's `fold` says it `adds` up over the clients, as one vector a term. The sum becomes the
  aggregate times the number of replies;
- what a term hands to ``ctx.aggregated``.

If the aggregator selects clients (Krum), it does so once in a round, by the updates. Buffers and uploads
come from the same clients. As nobody has looked at these yet, each is scaled down to the median norm of all
clients' first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from flwr_regs.abilities import Folds
from flwr_regs.chain import Chain
from flwr_regs.server.aggregate import aggregators
from flwr_regs.server.aggregate.aggregators import Aggregate, Aggregator, TooFewVectors, Vectors
from flwr_regs.server.aggregate.updates import Moves, Updates, in_shape, mean_delta, summed_dtype
from flwr_regs.server.round import RoundFailed
from flwr_regs.term import Slot
from flwr_regs.wire.arrays import NDArrays, all_finite
from flwr_regs.wire.errors import described


class AggregatorFailed(RoundFailed):
    """An aggregator raised an error, or returned something else than finite numbers for each coordinate."""


class Means:
    """What an aggregator makes of one round's replies.

    Parameters
    ----------
    aggregator : Aggregator
    mean : callable
        Averages the updates, for `Mean`; a private one clips and adds noise before any term sees the mean.

    Attributes
    ----------
    robust : bool
        Whether the aggregator is another than `Mean`.
    selected : list of int or None
        The clients that the aggregator kept; None if it does not choose, or before it has seen updates.
    bounded : set of int
        The clients whose updates were scaled down.
    """

    def __init__(self, aggregator: Aggregator, mean: Callable[..., NDArrays] = mean_delta) -> None:
        self._aggregator, self._mean = aggregator, mean
        self.robust = not isinstance(aggregator, aggregators.Mean)
        self.selected: list[int] | None = None
        self.bounded: set[int] = set()

    def delta(self, updates: Updates) -> dict[str, Any]:
        """Return the aggregate of the updates by name, as :func:`mean_delta` does; choose the clients."""
        if not self.robust:
            return self._mean(updates)
        base, replies = updates.base, updates.replies
        pids, share = list(replies), np.array([updates.weights[p] for p in replies])
        ratio = np.array([[updates.scaled[p] / updates.weights[p]] for p in pids])
        # all updates are read together, and more than once
        opened = {p: r.open for p, r in replies.items()}
        moves = {n: Moves(n, w, opened) for n, w in base.items()}

        def read(name: str, part: slice) -> np.ndarray:
            rows = moves[name].read(pids, part)
            return rows if name in updates.fixed else ratio * rows

        trained = {n: base[n].size for n in updates.trained}
        dtype = np.result_type(np.float16, *(summed_dtype(base[n]) for n in trained))
        vectors = Vectors(pids, trained, read, dtype)
        aggregate = self._aggregate(self._aggregator, vectors, share)
        self.selected = None if aggregate.selected is None else sorted(aggregate.selected)
        self.bounded = set(aggregate.bounded)
        parts = _split(aggregate.vector, trained)
        for name in base.keys() & updates.fixed:
            vectors = Vectors(pids, {name: base[name].size}, read)
            parts[name] = self._beside(vectors, share).vector
        return {n: in_shape(parts[n], w) for n, w in base.items()}

    def members(self, pids: Iterable[int]) -> list[int]:
        """Return the clients whose values count; all of them if the aggregator does not choose."""
        return [p for p in pids if self.selected is None or p in self.selected]

    def aggregated(self, values: Mapping[int, Slot]) -> Slot:
        """Return the robust mean of one dict of arrays a client, taken as one vector: ``ctx.aggregated``.

        Floats keep their dtype. Raises ValueError unless all have the same keys and shapes, and
        TooFewVectors for fewer clients than the aggregator needs.
        """
        rows = [{key: np.asarray(a) for key, a in v.items()} for v in values.values()]
        like = rows[0] if rows else {}
        sizes = {key: a.size for key, a in like.items()}
        shapes = {key: a.shape for key, a in like.items()}
        if any({key: a.shape for key, a in row.items()} != shapes for row in rows):
            raise ValueError(f"other arrays than {shapes}, which another client sent")

        def read(key: str, part: slice) -> np.ndarray:
            return np.stack([row[key].reshape(-1)[part] for row in rows]).astype(np.float64)

        vectors = Vectors(list(values), sizes, read)
        share = np.full(len(values), 1 / max(len(values), 1))
        parts = _split(self._beside(vectors, share).vector, sizes)
        return {key: in_shape(parts[key], a) for key, a in like.items()}

    def sums(self, chain: Chain, each: Mapping[Any, Slot]) -> Slot:
        """Return the terms' folds with robust sums in place of sums.

        `each` has what `fold` makes of one client alone, by partition id and term name. Entries that a
        term does not add up are notes of single clients; those of the clients that count are kept.
        """
        out: Slot = {}
        for t in chain.able(Folds):
            folded = {pid: slots[t.name] for pid, slots in each.items()}
            added = {p: {k: a for k, a in s.items() if t.adds(k)} for p, s in folded.items()}
            total = {key: len(added) * a for key, a in self.aggregated(added).items()}
            counted = [folded[pid] for pid in self.members(folded)]
            out[t.name] = total | {k: a for s in counted for k, a in s.items() if not t.adds(k)}
        return out

    def _beside(self, vectors: Vectors, weights: np.ndarray) -> Aggregate:
        """Return the aggregate of values other than updates, from the clients that were selected."""
        if not vectors.size:
            return Aggregate(np.zeros(0))
        if self.selected is None:
            beside = getattr(self._aggregator, "beside", lambda: self._aggregator)()
            return self._aggregate(beside, vectors, weights)
        scale = aggregators.shrink(vectors.norms())
        chosen = np.isin(vectors.pids, self.selected)
        if not chosen.any():
            only = f"values came only from {list(vectors.pids)}"
            raise TooFewVectors(f"{self._aggregator!r} selected {self.selected}, but {only}")
        return Aggregate(vectors.combined(chosen * scale / chosen.sum()))

    def _aggregate(self, aggregator: Aggregator, vectors: Vectors, share: np.ndarray) -> Aggregate:
        """Run an aggregator and check its result."""
        name = f"aggregator={aggregator!r:.100}"
        try:
            made = aggregator.aggregate(vectors, share)
        except TooFewVectors:
            raise
        except Exception as error:
            raise AggregatorFailed(f"{name} fails: {described(error)}") from error
        result = made if isinstance(made, Aggregate) else Aggregate(made)
        if wrong := _what_is_wrong(result, vectors):
            raise AggregatorFailed(f"{name} {wrong}")
        return result


def _what_is_wrong(result: Aggregate, vectors: Vectors) -> str:
    """Return what is wrong with an aggregator's result; "" if nothing is."""
    vector, chosen = result.vector, result.selected
    if not isinstance(vector, np.ndarray) or vector.dtype.kind not in "fiu":
        return f"returned a {type(vector).__name__}, expected an array of numbers"
    if vector.shape != (vectors.size,):
        return f"returned an array of shape {vector.shape}, expected {(vectors.size,)}"
    if not all_finite(vector):
        return "returned NaN or infinity"
    if chosen is not None and not (len(chosen) and set(chosen) <= set(vectors.pids)):
        return f"selected {list(chosen)!r:.100}, expected some of {list(vectors.pids)}"
    return ""


def _split(vector: np.ndarray, sizes: Mapping[str, int]) -> NDArrays:
    """Return the parts of a vector by name."""
    ends = np.cumsum(list(sizes.values()))[:-1]
    return dict(zip(sizes, np.split(vector, ends), strict=True)) if sizes else {}
