"""Aggregators: how the clients' updates become one, when some of the clients may be hostile.

An aggregator gets n vectors ``x_k``, one for each client, and returns one. ``x_k = (ω_k / p_k) Δ_k``, all
trained parameters as one vector: with the weights p_k, their mean is ``Σ ω_k Δ_k``. `Mean` alone reads the
weights; the others give each client one voice, because a client's number of examples is its own word.

| `Mean`             | ``Σ p_k x_k``
| `CoordinateMedian` | the median of each coordinate (Yin et al. 2018, Option I)
| `TrimmedMean`      | the mean of each coordinate without its extremes (Yin et al. 2018, Option II)
| `Krum`             | the vector with the nearest neighbours, or several's mean (Blanchard et al. 2017)
| `GeometricMedian`  | ``argmin_z Σ ‖x_k − z‖``, by Weiszfeld's steps (Pillutla et al. 2022, Alg. 2)
| `NormBound`        | the mean, after long vectors are scaled down (Sun et al. 2019, Sec. 4)
| `CenteredClipping` | ``v ← v + mean(clip(x_k − v))`` (Karimireddy et al. 2021, Eq. 6)

docs/robustness.md says what each assumes and costs. An aggregator of your own is any object with the method
of :class:`Aggregator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from flwr_regs.server.failures import Passing
from flwr_regs.term import COUNT, POSITIVE, WHOLE, Range, check_ranges
from flwr_regs.wire.arrays import pieces
from flwr_regs.wire.config import Spelled

READ = 1 << 17
"""How many numbers of all vectors together are read at a time: 1 MiB in float64, as a core's cache has."""
WEISZFELD_STEPS, SMOOTHING = 100, 1e-6


class TooFewVectors(Passing):
    """There are fewer vectors than an aggregator needs; the text names it and both numbers."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """One vector for each client, in float64, read some coordinates at a time, never all together.

    Attributes
    ----------
    pids : sequence of int
        The clients, by partition id; row i is that of ``pids[i]``. ``len(vectors)`` is n.
    sizes : mapping of str to int
        The parts of a vector, in their order, and how many coordinates each has.
    read : callable
        ``read(part, slice)`` returns some coordinates of all clients' part, ``(n, m)``, as a new array.
    dtype : dtype
        What results are rounded to: the model's own, in which they take a model's memory.
    """

    pids: Sequence[int]
    sizes: Mapping[str, int]
    read: Callable[[str, slice], np.ndarray]
    dtype: Any = np.float64

    @property
    def size(self) -> int:
        """d, the coordinates of a vector."""
        return sum(self.sizes.values())

    def __len__(self) -> int:
        return len(self.pids)

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (which coordinates, their values in all vectors: ``(n, m)``), from first to last."""
        first = 0
        for name, size in self.sizes.items():
            for part in pieces(size, max(1, READ // len(self))):
                yield slice(first + part.start, first + part.stop), self.read(name, part)
            first += size

    def matrix(self) -> np.ndarray:
        """Return all vectors, ``(n, d)``."""
        values = [self.read(name, slice(0, size)) for name, size in self.sizes.items()]
        return np.concatenate(values, axis=1)

    def norms(self, centre: np.ndarray | None = None) -> np.ndarray:
        """Return ``‖x_k − centre‖`` (default: 0) of each vector: ``(n,)``."""
        squares = np.zeros(len(self))
        for at, x in self.blocks():
            apart = x if centre is None else x - centre[at]
            squares += np.einsum("ij,ij->i", apart, apart)
        return np.asarray(np.sqrt(squares))

    def combined(self, weights: np.ndarray) -> np.ndarray:
        """Return ``Σ weights_k x_k``, summed in the order of the rows: ``(d,)``."""
        return self.each(lambda x: np.einsum("k,kj->j", weights, x))

    def each(self, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return what `function` makes of each block, ``(n, m) -> (m,)``, put together: ``(d,)``."""
        out = np.zeros(self.size, self.dtype)
        for at, x in self.blocks():
            out[at] = function(x)
        return out


@dataclass(frozen=True)
class Aggregate:
    """What an aggregator returns.

    Attributes
    ----------
    vector : numpy.ndarray
        ``(d,)``.
    selected : sequence of int, optional
        The clients whose vectors count, if the aggregator chooses some and leaves out the others. Buffers
        and uploads then come from the same clients.
    bounded : sequence of int
        The clients whose vectors were scaled down.
    """

    vector: np.ndarray
    selected: Sequence[int] | None = None
    bounded: Sequence[int] = ()


@runtime_checkable
class Aggregator(Protocol):
    """Makes one vector of the clients' vectors."""

    def aggregate(self, vectors: Vectors, weights: np.ndarray) -> Aggregate | np.ndarray:
        """Return the aggregate of n vectors, given their weights p_k, ``(n,)``, which sum to 1.

        The order of the clients must not matter. Raises :class:`TooFewVectors` if n is too small. What
        else it raises, and a result that has not d finite numbers, fails the round, and the model stays.

        One with an absolute bound also has a method `beside` that returns one without: it aggregates
        buffers and uploads, whose units are not those of the updates.
        """


@dataclass(frozen=True)
class _Checked(Spelled):
    """Refuses numbers out of range by their names."""

    ranges: ClassVar[Mapping[str, Range]] = {}

    def __post_init__(self) -> None:
        check_ranges(self)

    def _need(self, least: int, vectors: Vectors) -> None:
        if len(vectors) < least:
            raise TooFewVectors(f"{self} needs at least {least}, and there are {len(vectors)}")


@dataclass(frozen=True)
class Mean(_Checked):
    """The weighted mean, ``Σ p_k x_k = Σ ω_k Δ_k``: one client can move it anywhere.

    The server never holds all updates for it: it adds them up one at a time.
    """

    def aggregate(self, vectors: Vectors, weights: np.ndarray) -> Aggregate:
        return Aggregate(vectors.combined(weights))


@dataclass(frozen=True)
class CoordinateMedian(_Checked):
    """The median of each coordinate; of an even number of clients, the mean of the middle two."""

    def aggregate(self, vectors: Vectors, weights: np.ndarray) -> Aggregate:
        return Aggregate(_median(vectors))


def _median(vectors: Vectors) -> np.ndarray:
    return vectors.each(lambda x: np.median(x, axis=0))


@dataclass(frozen=True)
class TrimmedMean(_Checked):
    """The mean of each coordinate without its smallest and largest values.

    Parameters
    ----------
    share : float
        From 0 to below 0.5. ``int(share · n)`` values are cut at *each* end: it tolerates at most so many
        hostile clients.
    """

    ranges: ClassVar = {"share": Range("a number from 0 to below 0.5", lambda v: 0 <= v < 0.5)}
    share: float

    def aggregate(self, vectors: Vectors, weights: np.ndarray) -> Aggregate:
        cut = int(self.share * len(vectors) + 1e-9)  # 0.29 * 100 is just below 29
        self._need(2 * cut + 1, vectors)
        keep = slice(cut, len(vectors) - cut)  # sorted: clients in another order give the same sum
        return Aggregate(vectors.each(lambda x: np.sort(x, axis=0)[keep].mean(axis=0)))


@dataclass(frozen=True)
class Krum(_Checked):
    """The mean of the `keep` vectors that are nearest to their neighbours: Krum, or Multi-Krum.

    A vector's score is the sum of the squared distances to its ``n − byzantine − 2`` nearest others. Of
    equal scores, the lower partition id comes first.

    Parameters
    ----------
    byzantine : int
        f ≥ 0, how many hostile clients of a cohort to bear. The paper's proof asks for ``n ≥ 2f + 3``; a
        round needs ``f + max(3, keep)`` replies.
    keep : int
        m ≥ 1, how many vectors to keep; 1 is Krum.
    """

    ranges: ClassVar = {"byzantine": WHOLE, "keep": COUNT}
    byzantine: int
    keep: int = 1

    def aggregate(self, vectors: Vectors, weights: np.ndarray) -> Aggregate:
        self._need(self.byzantine + max(3, self.keep), vectors)
        apart = _squared_distances(vectors)
        np.fill_diagonal(apart, np.inf)
        nearest = np.sort(apart, axis=1)[:, : len(vectors) - self.byzantine - 2]
        rows = np.sort(np.argsort(nearest.sum(axis=1), kind="stable")[: self.keep])
        share = np.isin(range(len(vectors)), rows) / len(rows)
        return Aggregate(vectors.combined(share), [vectors.pids[i] for i in rows])


def _squared_distances(vectors: Vectors) -> np.ndarray:
    """Return ``‖x_i − x_j‖²``, ``(n, n)``.

    Not from products: of two vectors that are near each other, as far from 0 as they are, these keep too
    few digits.
    """
    apart = np.zeros((len(vectors), len(vectors)))
    for _, x in vectors.blocks():
        for i, row in enumerate(x):
            gaps = x[i + 1 :] - row
            apart[i, i + 1 :] += np.einsum("ij,ij->i", gaps, gaps)
    return apart + apart.T


@dataclass(frozen=True)
class GeometricMedian(_Checked):
    """The point with the least sum of distances to the vectors.

    100 of Weiszfeld's steps from the coordinate median; a distance below ν = 1e-6 counts as ν.
    """

    def aggregate(self, vectors: Vectors, weights: np.ndarray) -> Aggregate:
        z = _median(vectors)
        for _ in range(WEISZFELD_STEPS):
            pull = 1 / np.maximum(vectors.norms(z), SMOOTHING)
            before, z = z, vectors.combined(pull / pull.sum())
            if np.array_equal(before, z):  # so would all further steps be
                break
        return Aggregate(z)


@dataclass(frozen=True)
class NormBound(_Checked):
    """The mean of the vectors, those scaled down that are longer than a bound.

    Parameters
    ----------
    max_norm : float, optional
        The bound, in the units of the parameters. None: the median of the vectors' norms. Buffers and
        uploads have other units: theirs is always the median.
    """

    ranges: ClassVar[Mapping[str, Range]] = {"max_norm": POSITIVE}
    max_norm: float | None = None

    def aggregate(self, vectors: Vectors, weights: np.ndarray) -> Aggregate:
        scale = shrink(vectors.norms(), self.max_norm)
        return Aggregate(vectors.combined(scale / len(vectors)), bounded=_below_one(vectors, scale))

    def beside(self) -> NormBound:
        return NormBound()


@dataclass(frozen=True)
class CenteredClipping(_Checked):
    """``v ← v + mean_k (x_k − v) min(1, τ / ‖x_k − v‖)``, from ``v = 0``.

    Parameters
    ----------
    radius : float or None
        τ > 0, in the units of the parameters. None: the median of the vectors' norms. Buffers and uploads
        have other units: theirs is always the median.
    iters : int
        How many times.
    """

    ranges: ClassVar[Mapping[str, Range]] = {"radius": POSITIVE, "iters": COUNT}
    radius: float | None = None
    iters: int = 3

    def aggregate(self, vectors: Vectors, weights: np.ndarray) -> Aggregate:
        n, v, radius = len(vectors), np.zeros(vectors.size, vectors.dtype), self.radius
        for _ in range(self.iters):
            norms = vectors.norms(v)
            radius = float(np.median(norms)) if radius is None else radius  # of v = 0
            scale = shrink(norms, radius)
            v *= 1 - scale.sum() / n
            v += vectors.combined(scale / n)
        return Aggregate(v, bounded=_below_one(vectors, scale))

    def beside(self) -> CenteredClipping:
        return CenteredClipping(None, self.iters)


def shrink(norms: np.ndarray, bound: float | None = None) -> np.ndarray:
    """Return ``min(1, bound / norm)`` for each norm; the default bound is their median."""
    most = float(np.median(norms)) if bound is None else bound
    return np.where(norms > most, most / np.where(norms > most, norms, 1.0), 1.0)


def _below_one(vectors: Vectors, scale: np.ndarray) -> list[int]:
    return [pid for pid, s in zip(vectors.pids, scale, strict=True) if s < 1]
