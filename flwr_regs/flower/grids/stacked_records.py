"""What a stack's clients keep and send, as Flower's records: read and written for all of them at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from flwr_regs.client.memory.state import to_numpy
from flwr_regs.cohort.finishing import Slots
from flwr_regs.cohort.member_view import Packed
from flwr_regs.term import Slot
from flwr_regs.wire.arrays import plain_name
from flwr_regs.wire.records import from_record, read_entry, to_array


class Kept(Packed):
    """A slot that is a record, decoded when it is read: most are only passed on, or stacked."""

    def __init__(self, record: ArrayRecord) -> None:
        self.record = record

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return {k: torch.from_numpy(a) for k, a in from_record(self.record).items()}

    @cached_property
    def form(self) -> Hashable:
        """All that the record says beside numbers: names, labels, headers, and how many bytes there are."""
        return tuple(
            (k, a.dtype, tuple(a.shape), a.stype, _header(a.data), len(a.data))
            for k, a in sorted(self.record.items())
        )

    @staticmethod
    def stacked(slots: Sequence[Any]) -> dict[str, Tensor]:
        """Return slots of one form as one. What is wrong with one is so with all, and raises."""
        found = {}
        for key, first in slots[0].record.items():
            one = read_entry(key, first)
            start = len(first.data) - one.nbytes
            if one.flags.c_contiguous:
                each = [np.frombuffer(s.record[key].data, one.dtype, -1, start) for s in slots]
            else:
                each = [read_entry(key, s.record[key]).reshape(-1) for s in slots]
            rows = np.concatenate(each).reshape(len(slots), *one.shape)
            found[plain_name(key)] = torch.from_numpy(rows)
        return found

    def __getitem__(self, key: str) -> Tensor:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self.record)


class Writer:
    """Makes the records of one stack's replies."""

    def __init__(self) -> None:
        self._notes: dict[Any, ArrayRecord] = {}

    def slots(self, slots: Slots, k: int) -> list[Slot]:
        """Return the members' slots, those of `k` members, each as what the node keeps."""
        if isinstance(slots, list):
            each = [{t: own for t, own in mine.items() if own} for mine in slots]
            return [{t: Kept(self.record(own)) for t, own in mine.items()} for mine in each]
        rows: list[Slot] = [{} for _ in range(k)]
        for t, own in slots.items():
            arrays = {key: written(to_numpy(a)) for key, a in own.items()}
            for row, mine in enumerate(rows if own else ()):
                mine[t] = Kept(filled({key: each[row] for key, each in arrays.items()}))
        return rows

    def record(self, slot: Mapping[str, Any]) -> ArrayRecord:
        """Return a slot's record; numbers alone, as the note on the last round, are written once."""
        if isinstance(slot, Kept):
            return slot.record
        arrays = {n: to_numpy(a) for n, a in slot.items()}
        if any(a.ndim for a in arrays.values()):
            return filled({n: to_array(a) for n, a in arrays.items()})
        key = tuple((n, a.dtype, a.tobytes()) for n, a in arrays.items())
        if key not in self._notes:
            self._notes[key] = filled({n: to_array(a) for n, a in arrays.items()})
        return self._notes[key]


def _header(data: bytes) -> bytes:
    """Return the header of a ``.npy`` of version 1, which says itself how long it is; else all of it."""
    end = 10 + int.from_bytes(data[8:10], "little")
    return data[:end] if data[6:8] == b"\x01\x00" else data


def filled(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Return a record of these arrays."""
    record = ArrayRecord()
    for n, a in arrays.items():  # given all at once, each would be made twice
        record[n] = a
    return record


def written(stacked: np.ndarray) -> Sequence[Array]:
    """Return each row as :func:`.records.to_array` writes it, with one header for all of them."""
    rows = np.ascontiguousarray(stacked)
    first = np.asarray(rows[0])
    if first.dtype.kind not in "biuf" or not first.size:
        return [to_array(np.asarray(row)) for row in rows]
    like = to_array(first)
    header = like.data[: len(like.data) - first.nbytes]
    found = []
    for row in rows.reshape(len(rows), -1).view(np.uint8):
        found.append(one := object.__new__(Array))  # Flower checks what it makes anew
        vars(one).update(vars(like), data=b"".join((header, row.data)))
    return found
