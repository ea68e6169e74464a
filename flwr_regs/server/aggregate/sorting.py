"""Sorts many short columns at once: the same comparisons for all, in any order of rows, row by row.

A sorting network compares fixed pairs of rows. Each comparison is a minimum and a maximum of two rows,
which NumPy makes for many columns in one call; its own sort takes the columns one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

MOST_ROWS = 256
"""With more, a network has so many comparisons that a sort of each column is as fast."""


def sorted_rows(x: np.ndarray, wanted: range) -> list[np.ndarray]:
    """Return the `wanted` rows of ``np.sort(x, axis=0)``; what `x` holds afterwards is undefined."""
    if len(x) > MOST_ROWS:
        x.sort(axis=0)
        return [x[i] for i in wanted]
    rows, spare = list(x), np.empty_like(x[0])
    for i, j, low, high in _network(len(x), wanted):
        if low and high:
            np.minimum(rows[i], rows[j], out=spare)
            np.maximum(rows[i], rows[j], out=rows[j])
            rows[i], spare = spare, rows[i]
        elif low:
            np.minimum(rows[i], rows[j], out=rows[i])
        else:
            np.maximum(rows[i], rows[j], out=rows[j])
    return [rows[i] for i in wanted]


@lru_cache(maxsize=64)
def _network(n: int, wanted: range) -> tuple[tuple[int, int, bool, bool], ...]:
    """Return the comparisons (i, j, whether the minimum is needed, whether the maximum is) for n rows."""
    needed, found = set(wanted), []
    for i, j in reversed(list(_comparisons(n))):
        if i in needed or j in needed:
            found.append((i, j, i in needed, j in needed))
            needed |= {i, j}
    return tuple(reversed(found))


def _comparisons(n: int) -> Iterator[tuple[int, int]]:
    """Yield the comparisons that sort n rows: Batcher's (Knuth, TAOCP 3, 5.2.2, Algorithm M)."""
    p = top = 1 << max(n - 1, 0).bit_length() >> 1
    while p:
        q, r, d = top, 0, p
        while d:
            yield from ((i, i + d) for i in range(n - d) if i & p == r)
            d, q, r = q - p, q // 2, p
        p //= 2
