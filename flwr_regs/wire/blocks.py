"""Arrays block by block: what is made of a large array needs no memory of its size beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

BLOCK = 1 << 15
"""Coordinates of a block: in float64 a few blocks lie in a processor's cache."""


def blocks(size: int, width: int = BLOCK) -> Iterator[slice]:
    """Yield the slices of a vector, at most `width` coordinates each, from first to last."""
    for start in range(0, size, width):
        yield slice(start, min(start + width, size))


def order_of(array: np.ndarray) -> Any:
    """Return the order ("C" or "F") in which an array lies in memory; "C" if in neither."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def flat(array: np.ndarray, order: Any = None) -> np.ndarray:
    """Return an array as a vector, in `order` (default: its own): a view, if it lies in that order."""
    return array.reshape(-1, order=order or order_of(array))


def square_sum(array: np.ndarray) -> float:
    """Return the sum of an array's squares, added up in float64."""
    vector, total = flat(array), 0.0
    for part in blocks(vector.size):
        x = vector[part].astype(np.float64)
        total += float(np.dot(x, x))
    return total
