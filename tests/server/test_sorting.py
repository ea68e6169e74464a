"""Sorting networks against numpy's sort."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_regs.server.aggregate.sorting import MOST_ROWS, sorted_rows


@pytest.mark.parametrize("n", [*range(1, 20), 33, 64, 100, MOST_ROWS, MOST_ROWS + 1])
def test_rows_are_sorted_as_numpy_sorts_them(n: int) -> None:
    """All rows, the middle ones, and those between the extremes; with ties."""
    x = np.random.default_rng(n).integers(-9, 9, (n, 200)).astype(float)
    expected = np.sort(x, axis=0)
    for wanted in (range(n), range((n - 1) // 2, n // 2 + 1), range(n // 4, n - n // 4)):
        found = sorted_rows(x.copy(), wanted)
        np.testing.assert_array_equal(found, expected[wanted.start : wanted.stop])
