"""Flower's records: converts arrays and numbers to records and back."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import flwr
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_regs.wire.arrays import NDArrays, ProtocolError, plain_name
from flwr_regs.wire.config import with_plain_numbers
from flwr_regs.wire.keys import ARRAYS, CONFIG, FLOWER_KEY, METRICS, PROTOCOL, PROTOCOL_KEY
from flwr_regs.wire.npy import Unreadable, read_header
from flwr_regs.wire.parcel import Parcel, scalar_bytes
from flwr_regs.wire.text import LONGEST_NAME, named, quoted, shown

if TYPE_CHECKING:
    from torch import nn

KINDS: dict[str, Any] = {CONFIG: ConfigRecord, METRICS: MetricRecord}
_label = cache(str)  # how Flower labels a dtype; there are a dozen
REFUSED = b"refused by the client: "
LONGEST_REFUSAL = 2000
"""Characters of the reason of a refusal: numpy prints no longer header."""


def to_record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return an ArrayRecord under the same names; numpy scalars become 0-d arrays."""
    record = ArrayRecord()  # its constructor would make each array anew
    for name, array in arrays.items():
        record[name] = Array(np.asarray(array))
    return record


def arrays_in(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return a content's array records; Flower's ``array_records`` writes each of them once more."""
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


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
        if name in arrays:
            twice = "it came twice, with and without what torch.compile adds to names"
            raise ProtocolError(f"array '{shown(name, LONGEST_NAME)}' cannot be read: {twice}")
        arrays[name] = view_of(name, array)
    return arrays


def view_of(name: str, array: Array) -> np.ndarray:
    """Return one array of :func:`views_of`."""
    try:
        if array.stype != "numpy.ndarray":
            raise Unreadable(f"it is labelled {quoted(array.stype, 40)}, expected 'numpy.ndarray'")
        head = read_header(array.data)  # before memory is spent
        if array.dtype not in ("", _label(head.dtype)):
            raise Unreadable(f"it is {head.dtype}, but is labelled {quoted(array.dtype, 40)}")
        if tuple(array.shape) not in ((), head.shape):
            label = quoted(array.shape, 80)
            raise Unreadable(f"it has shape {head.shape}, but is labelled {label}")
        return head.view(array.data)
    except (Unreadable, TypeError) as error:
        if isinstance(array.data, bytes) and array.data.startswith(REFUSED, 12):
            why = array.data[12 : 12 + LONGEST_REFUSAL].decode(errors="replace")
            raise ProtocolError(shown(why, LONGEST_REFUSAL)) from error
        who = f"array '{shown(name, LONGEST_NAME)}'"
        raise ProtocolError(f"{who} cannot be read: {error}") from error


def record_of_state(state: Any) -> ArrayRecord:
    """Return a record itself, or that of a model's ``state_dict()``; TypeError for anything else.

    Also for bfloat16, which no record can hold.
    """
    if isinstance(state, ArrayRecord):
        return state
    if not isinstance(state, Mapping):
        hint = "; give model.state_dict()" * hasattr(state, "state_dict")
        given = f"not a {type(state).__name__}{hint}"
        raise TypeError(f"initial_arrays must be an ArrayRecord or a state_dict, {given}")
    if half := [n for n, v in state.items() if str(getattr(v, "dtype", "")) == "torch.bfloat16"]:
        raise TypeError(
            f"initial_arrays: {named(half)} are bfloat16, which Flower's messages cannot hold: give "
            "flwr_regs.float32_arrays(model), and the strategy wire_dtype='bfloat16'; frozen parameters "
            "need not travel: flwr_regs.trainable(model)"
        )
    return ArrayRecord(OrderedDict(state))


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


def metric_record(who: str, metrics: Mapping[str, Any] | None) -> MetricRecord | None:
    """Return the metrics that a function of the user's, `who`, has returned; TypeError for no numbers."""
    if metrics is None or isinstance(metrics, MetricRecord):
        return metrics
    record = MetricRecord()
    for name, value in with_plain_numbers(metrics).items():
        try:
            record[name] = value
        except TypeError as error:
            what = f"{who}: the metric '{name}' is {value!r:.80}"
            raise TypeError(f"{what}, expected a number or a list of numbers") from error
    return record


def reply_of(parcel: Parcel) -> RecordDict:
    """Return a client's reply as a message's content."""
    records: dict[str, Any] = {name: to_record(arrays) for name, arrays in parcel.records.items()}
    records[METRICS] = MetricRecord({**(parcel.metrics or {})})
    if parcel.config:
        records[CONFIG] = ConfigRecord({**parcel.config})
    return RecordDict(records)


def unreadable(why: str) -> bytes:
    """Return an array's bytes with `why` in place of shape and dtype; numpy's error then shows it."""
    header = REFUSED + why[:LONGEST_REFUSAL].encode()
    return b"\x93NUMPY\x03\x00" + struct.pack("<I", len(header)) + header


def refusal(why: str, older: bool) -> RecordDict:
    """Return a train reply that ends the run of Flower's server, or of its `older` one, with `why`."""
    array = ArrayRecord({"refused": Array("float32", (0,), "numpy.ndarray", unreadable(why))})
    if not older:
        return RecordDict({ARRAYS: array, METRICS: MetricRecord({"num-examples": 1})})
    content: RecordDict = RecordDict({"fitres.parameters": array, "fitres.metrics": ConfigRecord()})
    content["fitres.num_examples"] = MetricRecord({"num_examples": 1})
    content["fitres.status"] = ConfigRecord({"code": 0, "message": ""})
    return content


def parcel_of(content: RecordDict) -> Parcel:
    """Return a message's content, its arrays as views of their bytes; raise as :func:`views_of`."""
    records, scalars, size = dict[str, NDArrays](), dict[str, dict[str, Any]](), 0
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            records[name] = views_of(record)
            size += sum(len(key) + len(array.data) for key, array in record.items())
        else:
            size += scalar_bytes(values := dict(record))
            if isinstance(record, KINDS.get(name, ())):
                scalars[name] = values
    return Parcel(records, scalars.get(CONFIG, {}), scalars.get(METRICS), size)


def identity(node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a node says of itself to the IDENTIFY query: its partition and its Flower.

    The server refuses, by its name, a number that is not whole.
    """
    keys = [key for key in ("partition-id", "num-partitions") if key in node_config]
    numbers = {key: _whole(node_config[key]) for key in keys}
    return {PROTOCOL_KEY: PROTOCOL, FLOWER_KEY: flwr.__version__, **numbers}


def _whole(value: Any) -> Any:
    """Return a whole number, also one in a text, as an int; anything else as it is."""
    with suppress(ValueError, OverflowError):
        return int(value) if int(value) == float(value) else value
    return value


def float32_arrays(model: nn.Module) -> ArrayRecord:
    """Return a model's ``state_dict`` for `initial_arrays`, with bfloat16 and float16 entries in float32.

    The values are the same, and the model does not change (``model.float()`` would change it). For
    strategies with a `wire_dtype`, because their server keeps the model in float32.
    """
    if isinstance(model, type) or not hasattr(model, "state_dict"):
        given = type(model).__name__
        raise TypeError(f"float32_arrays takes a model, a torch.nn.Module, not {given}")
    halves = ("torch.bfloat16", "torch.float16")
    state = {plain_name(n): v.detach().cpu() for n, v in model.state_dict().items()}
    wide = {n: v.float() if str(v.dtype) in halves else v for n, v in state.items()}
    return ArrayRecord({n: Array(v.numpy()) for n, v in wide.items()})
