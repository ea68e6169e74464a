"""What comes back: which clients answered, and whether what they sent can be used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from flwr_regs.aggregation import Reply
from flwr_regs.flower import wire


def sort_replies(
    replies: Iterable[Message], partition_of: Mapping[int, int]
) -> tuple[dict[int, Message], dict[int, str]]:
    """Split replies into (answers, reasons of failure), each by partition id.

    `partition_of` maps the cohort's node ids to partition ids. Flower reports a node that went away
    as an error from node 1, and one that missed the timeout not at all, so failures are also found
    as cohort minus answered.
    """
    answered: dict[int, Message] = {}
    failures: dict[int, str] = {}
    stray: list[str] = []
    for reply in replies:
        pid = partition_of.get(reply.metadata.src_node_id)
        if reply.has_error():
            why = f"error code {reply.error.code}: {reply.error.reason}"
            if pid is None:
                stray.append(why)
            else:
                failures[pid] = why
        elif pid is not None:
            answered[pid] = reply
    for pid in partition_of.values():
        if pid not in answered and pid not in failures:
            failures[pid] = "no reply" + (f" ({'; '.join(stray)})" if stray else " in time")
    return answered, failures


def told(failures: Mapping[int, str]) -> str:
    """Name the failed clients with their errors, those with the same one together."""
    by_reason: dict[str, list[int]] = {}
    for pid, why in sorted(failures.items()):
        by_reason.setdefault(why, []).append(pid)
    return "; ".join(f"clients {pids} failed: {why}" for why, pids in by_reason.items())


def receive_metrics(
    pid: int, content: RecordDict, weighted_by_key: str
) -> tuple[MetricRecord, float]:
    """Return a reply's metrics and the client's examples; raise ProtocolError if there are none."""
    metrics = content.metric_records.get(wire.METRICS)
    if metrics is None:
        raise wire.ProtocolError(
            f"the reply of client {pid} must hold a MetricRecord '{wire.METRICS}', "
            f"but holds {sorted(content)}"
        )
    count = metrics.get(weighted_by_key)
    if not isinstance(count, int | float) or not 0 < count < float("inf"):
        raise wire.ProtocolError(
            f"the reply of client {pid}: metric '{weighted_by_key}' must be a positive number, "
            f"not {count!r}"
        )
    return metrics, float(count)


def receive(
    pid: int, content: RecordDict, model: wire.NDArrays, method: str, weighted_by_key: str
) -> tuple[Reply, set[str]]:
    """Check a train reply; return it with the names that the client does not train.

    A client that names no method is a plain one; only FedAvg can use its answer.

    Raises
    ------
    ProtocolError
        Another method's client, records missing, arrays that do not match the global model by name,
        shape or dtype, NaN or infinity, or no positive number of examples.
    """
    what = f"the reply of client {pid}"
    told: dict[str, Any] = dict(content.config_records.get(wire.CONFIG, ConfigRecord()))
    if told.get(wire.METHOD_KEY, "FedAvg") != method:
        raise wire.ProtocolError(
            f"{what} does not come from a {method} client but from "
            f"{told.get(wire.METHOD_KEY, 'one that names no method')}; use flwr_regs.{method}Client"
        )
    if wire.ARRAYS not in content.array_records:
        raise wire.ProtocolError(
            f"{what} must hold an ArrayRecord '{wire.ARRAYS}', but holds {sorted(content)}"
        )
    metrics, count = receive_metrics(pid, content, weighted_by_key)
    arrays = wire.from_record(content.array_records[wire.ARRAYS])
    wire.check_arrays(arrays, model, what)
    wire.check_finite(arrays, what)
    uploads = {}
    for key, record in content.array_records.items():
        if key.endswith(".upload"):
            uploads[key.removesuffix(".upload")] = wire.from_record(record)
            wire.check_finite(uploads[key.removesuffix(".upload")], f"{what}, {key}")
    buffers = set(json.loads(told.get(wire.BUFFERS_KEY, "[]")))
    return Reply(arrays=arrays, uploads=uploads, metrics=metrics, num_examples=count), buffers
