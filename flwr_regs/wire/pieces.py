"""Large arrays piece by piece: what is made of one then needs no memory of its size beside it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

PIECE = 1 << 14
"""Coordinates of a piece: in float64, a processor's cache holds those of many clients."""


def pieces(size: int, width: int = PIECE) -> Iterator[slice]:
    """Yield the slices of a vector, at most `width` coordinates each, from first to last."""
    for start in range(0, size, width):
        yield slice(start, min(start + width, size))


def square_sum(array: np.ndarray) -> float:
    """Return the sum of an array's squares, added up in float64."""
    vector, total = array.reshape(-1), 0.0
    for part in pieces(vector.size):
        wide = vector[part].astype(np.float64)
        total += float(np.dot(wide, wide))
    return total
