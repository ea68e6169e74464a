"""Arrays that are mostly zeros, as the places and values of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

MOST = 8
"""At most one entry in so many is not zero: then places and values take half of the array's memory."""


class Sparse(NamedTuple):
    """An array; it reads as zero where nothing else is noted.

    Attributes
    ----------
    places, values : array
        The entries that are not zero: where in the array as a vector in the order "C", ascending; and what.
    shape : tuple of int
    """

    places: np.ndarray
    values: np.ndarray
    shape: tuple[int, ...]

    @property
    def dense(self) -> np.ndarray:
        """The array itself."""
        out = np.zeros(self.shape, self.values.dtype)
        out.reshape(-1)[self.places] = self.values
        return out

    def read(self, part: slice, out: np.ndarray) -> None:
        """Write some coordinates of the vector into `out`."""
        out.fill(0)
        first, last = np.searchsorted(self.places, np.array((part.start, part.stop), np.uint32))
        out[self.places[first:last] - part.start] = self.values[first:last]


def sparse(arrays: Mapping[str, np.ndarray]) -> dict[str, Sparse] | None:
    """Return the arrays without their zeros; None if too many of their entries are not zero."""
    if any(a.size >= 1 << 32 for a in arrays.values()):
        return None
    filled = sum(int(np.count_nonzero(a != 0)) for a in arrays.values())
    if filled * MOST > sum(a.size for a in arrays.values()):
        return None
    found = {}
    for name, a in arrays.items():
        vector = a.reshape(-1)
        places = np.flatnonzero(
            vector != 0
        )  # of truths: numpy finds places of floats far more slowly
        found[name] = Sparse(places.astype(np.uint32), vector[places], a.shape)
    return found
