"""The content of a message as plain values (arrays by record, a config, metrics), and its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from flwr_regs.wire import keys
from flwr_regs.wire.npy import npy_bytes
from flwr_regs.wire.rows import Row
from flwr_regs.wire.text import named


class Record(dict[str, np.ndarray]):
    """Arrays by name, to be sent; the same record may go to many clients."""

    @cached_property
    def nbytes(self) -> int:
        """Names and arrays in bytes, as they travel: ``.npy`` headers count."""
        return sum(len(name) + npy_bytes(np.asarray(a)) for name, a in self.items())


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
        arrays = sum(
            r.nbytes if isinstance(r, Record | Row) else Record(r).nbytes
            for r in self.records.values()
        )
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
    total = sum(map(len, scalars))
    for value in scalars.values():
        if isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, list):
            total += sum(len(v) if isinstance(v, (str, bytes)) else 8 for v in value)
        else:
            total += 8
    return total
