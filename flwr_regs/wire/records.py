"""Flower's records: converts arrays and numbers to records and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import flwr
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_regs.wire.arrays import NDArrays, ProtocolError, plain_name, unpack
from flwr_regs.wire.keys import CONFIG, FLOWER_KEY, METRICS, PROTOCOL, PROTOCOL_KEY, ROUND_KEY
from flwr_regs.wire.npy import Unreadable, read_array, read_header, write_array
from flwr_regs.wire.parcel import Parcel, scalar_bytes
from flwr_regs.wire.text import LONGEST_NAME, quoted, shown

if TYPE_CHECKING:
    from torch import nn


NUMBERS = "biuf"
"""Kinds of dtypes that this package writes; the others are left to Flower."""


def to_record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return an ArrayRecord under the same names; numpy scalars become 0-d arrays."""
    return record_of({k: to_array(np.asarray(a)) for k, a in arrays.items()})


def record_of(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Return a record that holds these arrays themselves; its constructor would make each anew."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = array
    return record


def arrays_in(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return a content's array records; Flower's ``array_records`` writes each of them once more."""
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def to_array(array: np.ndarray) -> Array:
    """Return Flower's Array; one that is a view of its ``.npy``, as what arrives is, is not copied."""
    if array.dtype.kind not in NUMBERS:
        return Array(array)
    return Array(_label(array.dtype), array.shape, "numpy.ndarray", write_array(array))


def from_record(record: ArrayRecord) -> NDArrays:
    """Return the arrays of a record by name, writable, without what ``torch.compile`` adds to names.

    Raises ProtocolError naming an array that cannot be read.
    """
    return {k: a.copy(order="K") for k, a in views_of(record).items()}


def views_of(record: Mapping[str, Array]) -> NDArrays:
    """Return the arrays of :func:`from_record` as read-only views of their bytes.

    Raises ProtocolError unless the bytes of each are a ``.npy``, its labels say the same, and no name came
    twice. A label may be missing (dtype "", shape ()): Flower's older layout has none.
    """
    arrays: NDArrays = {}
    for key, array in record.items():
        name = plain_name(key)
        try:
            if name in arrays:
                raise Unreadable("it came twice, with and without what torch.compile adds to names")
            if array.stype != "numpy.ndarray":
                raise Unreadable(
                    f"it is labelled {quoted(array.stype, 40)}, expected 'numpy.ndarray'"
                )
            head = read_header(array.data)  # before memory is spent
            if array.dtype not in ("", _label(head.dtype)):
                raise Unreadable(f"it is {head.dtype}, but is labelled {quoted(array.dtype, 40)}")
            if tuple(array.shape) not in ((), head.shape):
                raise Unreadable(
                    f"it has shape {head.shape}, but is labelled {quoted(array.shape, 80)}"
                )
            arrays[name] = head.view(array.data)
        except (Unreadable, TypeError) as error:
            raise ProtocolError(
                f"array '{shown(name, LONGEST_NAME)}' cannot be read: {error}"
            ) from error
    return arrays


@cache
def _label(dtype: np.dtype[Any]) -> str:
    """Return how Flower labels a dtype; there are a dozen."""
    return str(dtype)


def record_of_state(state: Any) -> ArrayRecord:
    """Return a record itself, or that of a model's ``state_dict()``; TypeError for anything else."""
    if isinstance(state, ArrayRecord):
        return state
    if not isinstance(state, Mapping):
        hint = "; give model.state_dict()" if hasattr(state, "state_dict") else ""
        raise TypeError(
            f"initial_arrays must be an ArrayRecord or a state_dict, not a {type(state).__name__}{hint}"
        )
    return ArrayRecord(OrderedDict(state))


def plainly_named(record: ArrayRecord) -> ArrayRecord:
    """Return a record without what ``torch.compile`` adds to names; the record itself if there is none."""
    if all(plain_name(k) == k for k in record):
        return record
    return record_of({plain_name(k): a for k, a in record.items()})


class Writer:
    """Makes the contents of messages: what goes to many clients is written, and checked by Flower, once."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[Any, ArrayRecord]] = {}  # by identity; holds the objects
        self._configs: dict[tuple[str, ...], ConfigRecord] = {}  # by keys

    def content_of(self, parcel: Parcel) -> RecordDict:
        """Return a parcel as a message's content."""
        content = RecordDict()
        for name, record in parcel.records.items():
            if id(record) not in self._records:
                self._records[id(record)] = record, to_record(record)
            content[name] = self._records[id(record)][1]
        if parcel.config:
            content[CONFIG] = self._config(parcel.config)
        return content

    def _config(self, config: Mapping[str, Any]) -> ConfigRecord:
        """Return a config's record: a copy of an earlier one's, with the values that differ."""
        like = self._configs.get(names := tuple(config))
        if like is None:
            like = self._configs[names] = ConfigRecord({**config})
        record = like.copy()
        for (name, value), known in zip(config.items(), like.values(), strict=True):
            if value is not known and not (type(value) is int is type(known) and value == known):
                record[name] = value
        return record


def reply_of(parcel: Parcel) -> RecordDict:
    """Return a client's reply as a message's content."""
    records: dict[str, Any] = {name: to_record(arrays) for name, arrays in parcel.records.items()}
    records[METRICS] = MetricRecord({**(parcel.metrics or {})})
    records[CONFIG] = ConfigRecord({**parcel.config})
    return RecordDict(records)


def parcel_of(content: RecordDict) -> Parcel:
    """Return a message's content, its arrays as views of their bytes; raise as :func:`views_of`."""
    records: dict[str, NDArrays] = {}
    config: dict[str, Any] = {}
    metrics: dict[str, Any] | None = None
    size = 0
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            records[name] = views_of(record)
            size += sum(len(key) + len(array.data) for key, array in record.items())
            continue
        scalars: dict[str, Any] = dict(record.items())
        size += scalar_bytes(scalars)
        if name == CONFIG and isinstance(record, ConfigRecord):
            config = scalars
        elif name == METRICS and isinstance(record, MetricRecord):
            metrics = scalars
    return Parcel(records, config, metrics, size)


def sorted_entries(
    reply: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split a client's reply into (uploads as records, numbers, entries of a config).

    Uploads are mappings, or packed. The number of the round is an entry.
    """
    records: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for key, value in reply.items():
        if isinstance(value, bytes | Mapping) and key.endswith(".upload"):
            records[key] = to_record(unpack(value) if isinstance(value, bytes) else value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != ROUND_KEY:
            numbers[key] = value
        else:
            texts[key] = value
    return records, numbers, texts


def identity(node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a node says of itself to the IDENTIFY query: its partition and its Flower."""
    entries: dict[str, Any] = {PROTOCOL_KEY: PROTOCOL, FLOWER_KEY: flwr.__version__}
    for key in ("partition-id", "num-partitions"):
        if key in node_config:
            entries[key] = int(node_config[key])
    return entries


def identity_reply(node_config: Mapping[str, Any]) -> RecordDict:
    """Return the reply to the IDENTIFY query."""
    return RecordDict({CONFIG: ConfigRecord(identity(node_config))})


def float32_arrays(model: nn.Module) -> ArrayRecord:
    """Return a model's ``state_dict`` for `initial_arrays`, with bfloat16 and float16 entries in float32.

    The values are the same, and the model does not change (``model.float()`` would change it). For
    strategies with a `wire_dtype`, because their server keeps the model in float32.
    """
    halves = ("torch.bfloat16", "torch.float16")
    state = {plain_name(n): v.detach().cpu() for n, v in model.state_dict().items()}
    return ArrayRecord(
        {n: Array((v.float() if str(v.dtype) in halves else v).numpy()) for n, v in state.items()}
    )


def labelled(name: str, data: bytes) -> Array:
    """Return the Array of a ``.npy``, with its dtype and shape.

    It lies in C's order; a ``.npy`` that does so is not copied. Raises ProtocolError for other bytes.
    """
    try:
        head = read_header(data)
    except Unreadable as error:
        raise ProtocolError(
            f"array '{shown(name, LONGEST_NAME)}' cannot be read: {error}"
        ) from error
    if head.fortran:
        return Array(np.array(read_array(data), order="C"))
    return Array(_label(head.dtype), head.shape, "numpy.ndarray", data)
