"""What the tests of the oracles share: derivatives by central differences, models side by side."""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Params

SOME = [[0, 2], [0, 1, 2], [1, 2], [0, 1]]
"""Cohorts of four rounds, of `CLIENTS`."""


def slopes(value: Callable[[Params], float], w: Params) -> Params:
    """Return d value/d w by central differences of 1e-6."""
    out = {name: np.zeros_like(a) for name, a in w.items()}
    for name, a in w.items():
        for index in np.ndindex(a.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = {key: b.copy() for key, b in w.items()}
                moved[name][index] += step
                ends.append(value(moved))
            out[name][index] = (ends[0] - ends[1]) / 2e-6
    return out


def apart(a: Params, b: Params) -> float:
    """Return the largest difference of two models with the same names."""
    assert a.keys() == b.keys()
    return max(float(abs(a[name] - b[name]).max()) for name in a)
