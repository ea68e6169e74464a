"""Flower's records: arrays and numbers into and out of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from flwr_regs.wire.arrays import NDArrays, unpack
from flwr_regs.wire.keys import CONFIG, PROTOCOL, PROTOCOL_KEY

if TYPE_CHECKING:
    from torch import nn


def to_record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return an ArrayRecord under the same names; numpy scalars become 0-d arrays."""
    return ArrayRecord({k: Array(np.asarray(a)) for k, a in arrays.items()})


def from_record(record: ArrayRecord) -> NDArrays:
    """Return the arrays of a record by name."""
    return {k: a.numpy() for k, a in record.items()}


def sorted_answer(
    answer: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Part what a client answers into (its uploads as records, numbers, all that a config carries)."""
    records: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for key, value in answer.items():
        if isinstance(value, bytes) and key.endswith(".upload"):
            records[key] = to_record(unpack(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[key] = value
        else:
            texts[key] = value
    return records, numbers, texts


def identity_reply(node_config: Mapping[str, Any]) -> RecordDict:
    """Return the answer to the IDENTIFY query: who a node is, for the seeded cohorts."""
    answer: dict[str, int | float | str | bytes | bool] = {PROTOCOL_KEY: PROTOCOL}
    for key in ("partition-id", "num-partitions"):
        if key in node_config:
            answer[key] = int(node_config[key])
    return RecordDict({CONFIG: ConfigRecord({**answer})})


def float32_arrays(model: nn.Module) -> ArrayRecord:
    """Return a model's ``state_dict`` for `initial_arrays`, with bfloat16 and float16 entries in float32.

    The values are the same and the model stays as it is, where ``model.float()`` would change it. For
    strategies with a `wire_dtype`, whose server keeps the model in float32.
    """
    halves = ("torch.bfloat16", "torch.float16")
    state = {n: v.detach().cpu() for n, v in model.state_dict().items()}
    return ArrayRecord(
        {n: Array((v.float() if str(v.dtype) in halves else v).numpy()) for n, v in state.items()}
    )
