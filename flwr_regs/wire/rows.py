"""The arrays of several clients in one: with a first axis over the clients, of which each has a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from flwr_regs.wire.npy import npy_bytes

LARGEST_SUMMED = 1e18
"""Squares up to that of this number, and sums of some of them, are finite in float32."""


class Stack(dict[str, np.ndarray]):
    """Arrays with a first axis over the clients; they do not change."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self.expected: Mapping[str, np.ndarray] | None = None  # what a row was found to be like

    @cached_property
    def row_bytes(self) -> int:
        """The bytes of one client's names and arrays, as they travel."""
        return sum(len(name) + npy_bytes(a[0, ...]) for name, a in self.items())

    def table(self, name: str) -> np.ndarray:
        """Return an array with a vector for each client."""
        a = self[name]
        return a.reshape(len(a), -1)

    @cached_property
    def _squares(self) -> np.ndarray:
        """Each client's largest sum of squares of a float array; infinite beside other arrays."""
        squares = np.zeros(len(next(iter(self.values()))))
        with np.errstate(all="ignore"):
            for name, a in self.items():
                table = self.table(name)
                if a.dtype.kind == "f" and a.dtype.itemsize >= 4:
                    squares = np.maximum(squares, np.einsum("kj,kj->k", table, table))
                elif a.size:
                    squares[:] = np.inf
        return squares

    def small(self, largest: float) -> np.ndarray:
        """Return which clients' numbers are floats, finite and certainly from −`largest` to `largest`.

        The sum of squares is below the square of `largest` only if no number is beyond it.
        """
        return self._squares < min(largest, LARGEST_SUMMED) ** 2 / 16


class Row(Mapping[str, np.ndarray]):
    """One client's arrays."""

    def __init__(self, stack: Stack, at: int) -> None:
        self.stack, self.at = stack, at

    def __getitem__(self, name: str) -> np.ndarray:
        return self.stack[name][self.at, ...]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stack)

    def __len__(self) -> int:
        return len(self.stack)

    @property
    def nbytes(self) -> int:
        """Names and arrays in bytes, as they travel."""
        return self.stack.row_bytes

    def is_usable(self, expected: Mapping[str, np.ndarray], largest: float) -> bool:
        """Whether names, shapes and dtypes are as expected, and all numbers are small enough."""
        stack = self.stack
        if stack.expected is not expected:
            alike = stack.keys() == expected.keys() and all(
                stack[n].shape[1:] == a.shape and stack[n].dtype == a.dtype
                for n, a in expected.items()
            )
            stack.expected = expected if alike else None
        return stack.expected is expected and bool(stack.small(largest)[self.at])
