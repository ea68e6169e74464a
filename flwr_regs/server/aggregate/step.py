"""The step to the new model: each array of both in one pass over its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flwr_regs.server.aggregate.updates import pieces
from flwr_regs.wire.arrays import NDArrays, add
from flwr_regs.wire.blocks import BLOCK, MOST_THREADS, flat, order_of, spread_over_threads
from flwr_regs.wire.npy import Blank

Read = Callable[[str, slice], np.ndarray]
"""``read(name, slice)``: some coordinates of an array, of the vector in the model's own order."""


@dataclass(frozen=True)
class Stepped:
    """A model after a step.

    Attributes
    ----------
    model : NDArrays
        Each array as it is sent: neither its record nor a message then copies it.
    squares : dict of str to float
        The sum of the squares of each array's step.
    moved : set of str
        The arrays whose step is not zero everywhere.
    """

    model: NDArrays
    squares: dict[str, float]
    moved: set[str]


def stepped(
    model: Mapping[str, np.ndarray],
    reader: Callable[[], Read],
    kept: Mapping[str, np.ndarray],
    width: int = BLOCK,
    most: int = MOST_THREADS,
) -> Stepped:
    """Return the model after a step, which is read in the dtypes of the model, at most `width` at a time.

    At most `most` threads read. `reader` makes what reads the step, once for each thread. The step is
    written into the arrays of `kept` too, those that are there; they lie in memory as the model's do.
    """
    old = {n: flat(w) for n, w in model.items()}
    new = {n: Blank(w.dtype, w.shape, order_of(w) == "F") for n, w in model.items()}
    copies = {n: flat(a, order_of(model[n])) for n, a in kept.items()}
    jobs = pieces({n: w.size for n, w in model.items()}, width)
    squares: dict[tuple[str, int], float] = {}
    moved: set[str] = set()

    def worker() -> Callable[[tuple[str, slice]], None]:
        read = reader()

        def work(job: tuple[str, slice]) -> None:
            name, part = job
            step = read(name, part)
            add(old[name][part], step, out=new[name].vector[part])
            if name in copies:
                copies[name][part] = step
            squares[name, part.start] = _square(step)
            if name not in moved and step.any():
                moved.add(name)

        return work

    spread_over_threads(jobs, worker, most)
    sums = {n: sum(squares[n, at] for at in range(0, w.size, width)) for n, w in old.items()}
    return Stepped({n: a.seal() for n, a in new.items()}, sums, moved)


def _square(step: np.ndarray) -> float:
    """Return the sum of a block's squares; in float32 if its range is enough.

    Not by `numpy.dot`: BLAS would start threads of its own in each thread.
    """
    if step.dtype == np.float32:
        with np.errstate(over="ignore"):
            if 1e-20 < (square := float(np.einsum("i,i", step, step))) < 1e30:
                return square
    wide = step.astype(np.float64)
    return float(np.einsum("i,i", wide, wide))


def as_step(base: np.ndarray, delta: Any) -> np.ndarray:
    """Return a step in the dtype of `base`, so that it can be added; rounded for integers."""
    if base.dtype == np.bool_:  # the mean's majority, as a flip
        return np.asarray(base ^ (base + np.asarray(delta) > 0.5))
    if np.issubdtype(base.dtype, np.integer):
        return np.asarray(np.rint(delta)).astype(base.dtype)
    return np.asarray(delta).astype(base.dtype, copy=False)
