"""The content of a message as plain values (arrays by record, a config, metrics), and its size.

The arrays of several clients may be in one, a `Stack`, of which each has a `Row`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from flwr_regs.wire import keys
from flwr_regs.wire.npy import npy_bytes
from flwr_regs.wire.text import named


class Record(dict[str, np.ndarray]):
    """Arrays by name, to be sent; the same record may go to many clients."""

    @cached_property
    def nbytes(self) -> int:
        """Names and arrays in bytes, as they travel: ``.npy`` headers count."""
        return sum(len(name) + npy_bytes(np.asarray(a)) for name, a in self.items())


class Stack(dict[str, np.ndarray]):
    """Arrays with a first axis over the clients; they do not change."""

    @cached_property
    def row_bytes(self) -> int:
        """The bytes of one client's names and arrays, as they travel."""
        return sum(len(name) + npy_bytes(a[0, ...]) for name, a in self.items())

    @cached_property
    def kinds(self) -> dict[str, tuple[Any, Any]]:
        """The shapes and dtypes of one client's arrays."""
        return {n: (a.shape[1:], a.dtype) for n, a in self.items()}

    @cached_property
    def largest(self) -> float:
        """The largest magnitude of all numbers; NaN or infinity if one is."""
        with np.errstate(all="ignore"):
            ends = [float(end) for a in self.values() if a.size for end in (a.min(), a.max())]
            return float(np.abs([0.0, *ends]).max())


class Row(Mapping[str, np.ndarray]):
    """One client's arrays."""

    def __init__(self, stack: Stack, at: int) -> None:
        self.stack, self.at = stack, at

    def __getitem__(self, name: str) -> np.ndarray:
        return self.stack[name][self.at, ...]

    def __contains__(self, name: object) -> bool:
        return name in self.stack

    def __iter__(self) -> Iterator[str]:
        return iter(self.stack)

    def __len__(self) -> int:
        return len(self.stack)

    @property
    def nbytes(self) -> int:
        """Names and arrays in bytes, as they travel."""
        return self.stack.row_bytes

    def is_usable(self, expected: Mapping[str, np.ndarray], largest: float) -> bool:
        """Whether its arrays are as expected, and all numbers of its stack are below `largest`."""
        kinds = {n: (a.shape, a.dtype) for n, a in expected.items()}
        return self.stack.kinds == kinds and self.stack.largest < largest


@dataclass(frozen=True)
class Parcel:
    """The content of a message.

    Attributes
    ----------
    records : mapping of str to mapping of str to array
        Record name -> arrays by name. A reply's arrays are decoded when they are read, which may raise.
    config : mapping
        Numbers, texts, bytes, and lists of these.
    metrics : mapping or None
        Numbers.
    decoded : mapping or None
        What the code of an update in the config stands for, of a client in this process.
    size : int or None
        Bytes of a received parcel; None for a parcel to be sent, whose bytes are counted.
    """

    records: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] | None = None
    size: int | None = None
    decoded: Mapping[str, np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        """The payload in bytes: serialised arrays, names and scalars.

        Framing does not count (Flower adds some 10 bytes an entry).
        """
        if self.size is not None:
            return self.size
        counted = (r if isinstance(r, Record | Row) else Record(r) for r in self.records.values())
        arrays = sum(record.nbytes for record in counted)
        return arrays + scalar_bytes(self.config) + scalar_bytes(self.metrics or {})

    @property
    def names(self) -> str:
        """The names of its records, for errors."""
        scalars = {keys.CONFIG: self.config, keys.METRICS: self.metrics}
        return named([*self.records, *(name for name, values in scalars.items() if values)])

    def says(self, what: str) -> bool:
        """Whether a client says this, in ``regs.memory``: see :mod:`flwr_regs.wire.keys`."""
        said = self.config.get(keys.MEMORY_KEY)
        return isinstance(said, list) and what in said


def scalar_bytes(scalars: Mapping[str, Any]) -> int:
    """Return the bytes of names and values: 8 for a number, its length for a text."""
    nbytes = 0
    for name, value in scalars.items():
        nbytes += len(name)
        if isinstance(value, list):
            nbytes += sum(len(v) if isinstance(v, (str, bytes)) else 8 for v in value)
        else:
            nbytes += len(value) if isinstance(value, (str, bytes)) else 8
    return nbytes
