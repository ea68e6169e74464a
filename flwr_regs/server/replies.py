"""What comes back: which clients answered, and whether what they sent can be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from flwr_regs.chain import Chain
from flwr_regs.server.aggregation import Reply
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import (
    NDArrays,
    ProtocolError,
    check_arrays,
    check_finite,
    check_tied,
    in_code_order,
    statistics,
    unmask,
)
from flwr_regs.wire.codec import decode
from flwr_regs.wire.precision import from_half
from flwr_regs.wire.records import from_record

if TYPE_CHECKING:
    from flwr_regs.server.model import GlobalState


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
    metrics = content.metric_records.get(keys.METRICS)
    if metrics is None:
        raise ProtocolError(
            f"the reply of client {pid} must hold a MetricRecord '{keys.METRICS}', "
            f"but holds {sorted(content)}"
        )
    count = metrics.get(weighted_by_key)
    if not isinstance(count, int | float) or not 0 < count < float("inf"):
        raise ProtocolError(
            f"the reply of client {pid}: metric '{weighted_by_key}' must be a positive number, "
            f"not {count!r}"
        )
    return metrics, float(count)


def receive(
    pid: int,
    content: RecordDict,
    model: NDArrays,
    method: str,
    term: Chain,
    config: Mapping[str, Any],
    weighted_by_key: str,
) -> tuple[Reply, frozenset[str]]:
    """Check a train reply; return it with the names under which the client trains nothing.

    A client that names no method is a plain one; only FedAvg can use its answer. `config` is the round's.

    Raises
    ------
    ProtocolError
        Another method's client, records missing, arrays that do not match the global model by name,
        shape or dtype, NaN or infinity, no positive number of examples, an upload that a term cannot
        use, or steps that the round did not ask for.
    """
    what = f"the reply of client {pid}"
    told: dict[str, Any] = dict(content.config_records.get(keys.CONFIG, ConfigRecord()))
    if told.get(keys.METHOD_KEY, "FedAvg") != method:
        raise ProtocolError(
            f"{what} does not come from a {method} client but from "
            f"{told.get(keys.METHOD_KEY, 'one that names no method')}; use "
            + ("" if "+" in method or "-" in method else f"flwr_regs.{method}Client, or ")
            + "RegClient or ClientRound with the strategy's terms"
        )
    if keys.ARRAYS not in content.array_records:
        raise ProtocolError(
            f"{what} must hold an ArrayRecord '{keys.ARRAYS}', but holds {sorted(content)}"
        )
    metrics, count = receive_metrics(pid, content, weighted_by_key)
    try:
        record, half = content.array_records[keys.ARRAYS], config.get(keys.HALF_KEY)
        in_half = {**told, keys.HALF_KEY: half}
        arrays = from_half(from_record(record), in_half) if half else from_record(record)
        uploads = receive_uploads(what, content)
        if keys.BUFFERS_KEY in told:
            buffers = unmask(told[keys.BUFFERS_KEY], model)
        else:  # a plain client: what cannot be trained, and BatchNorm's statistics by their names
            whole = [n for n, a in model.items() if a.dtype.kind != "f"]
            buffers = frozenset([*whole, *statistics(model)])
        tied: dict[str, str] = {}
        if keys.TIED_KEY in told:
            tied = check_tied(told[keys.TIED_KEY], model, buffers)
        delta, expected = {}, model
        if keys.UPDATE_KEY in told:
            delta = decode(told[keys.UPDATE_KEY], in_code_order(model, set(model) - buffers))
            expected = {n: model[n] for n in arrays if n in buffers}
        steps = (1, 1)
        if keys.METHOD_KEY in told:
            steps = _steps(metrics, config, count)
        if steps[0]:
            term.check(uploads, {n: a for n, a in model.items() if n not in buffers})
    except (ValueError, TypeError, EOFError) as error:
        raise ProtocolError(f"{what} cannot be used: {error}") from error
    check_arrays(arrays, expected, what)
    check_finite(arrays, what, model)
    return Reply(arrays, uploads, metrics, count, delta, steps, tied), buffers


def _steps(metrics: MetricRecord, config: Mapping[str, Any], count: float) -> tuple[int, int]:
    """Return ``s_k`` and E as the client told them; raise ValueError unless the round allows them."""
    taken, planned = metrics.get("local-steps"), metrics.get("planned-steps")
    asked = config.get("local-steps")
    most = asked or config["local-epochs"] * count  # a step is at least one example
    if (
        not isinstance(taken, int)
        or not isinstance(planned, int)
        or not 0 <= taken <= planned <= most
        or (asked and planned != asked)
        or planned == 0
    ):
        raise ValueError(
            f"{taken!r} local steps of {planned!r}, where the round asked for "
            + (f"{asked}" if asked else f"at most {most:.0f}")
        )
    return taken, planned


def receive_uploads(what: str, content: RecordDict) -> dict[str, NDArrays]:
    """Return the terms' uploads by term name; raise ProtocolError unless all are finite numbers."""
    uploads = {}
    for key, record in content.array_records.items():
        if key.endswith(".upload"):
            name = key.removesuffix(".upload")
            try:
                uploads[name] = from_record(record)
            except (ValueError, TypeError, EOFError) as error:
                raise ProtocolError(f"{what}, {key} cannot be read: {error}") from error
            if wrong := [k for k, a in uploads[name].items() if a.dtype.kind not in "fiub"]:
                raise ProtocolError(f"{what}: upload '{name}' holds no numbers in {wrong}")
            check_finite(uploads[name], f"{what}, {key}")
    return uploads


@dataclass(frozen=True)
class Usable:
    """The answers of a round that can be used, by partition id, and why the others cannot.

    `buffers` are the arrays that the clients do not train and `tied` the weights that go by several
    names (other name -> name that is trained), as the clients agree; None if none can be used.
    """

    replies: dict[int, Reply]
    failures: dict[int, str]
    buffers: frozenset[str] | None
    tied: Mapping[str, str] | None


def usable_replies(
    answered: Mapping[int, Message],
    state: GlobalState,
    method: str,
    term: Chain,
    config: Mapping[str, Any],
    weighted_by_key: str,
) -> Usable:
    """Check the answers to a round's train messages, one by one (:func:`receive`) and against each other.

    In the order of partition ids: the same bits whatever the order of arrival.
    """
    replies: dict[int, Reply] = {}
    failures: dict[int, str] = {}
    buffers: dict[int, frozenset[str]] = {}
    for pid in sorted(answered):
        content = answered[pid].content
        try:
            replies[pid], buffers[pid] = receive(
                pid, content, state.model, method, term, config, weighted_by_key
            )
        except ProtocolError as error:
            failures[pid] = str(error)
    agreed, wrong = agree_on_buffers(buffers, state.buffers)
    replies = {pid: reply for pid, reply in replies.items() if pid not in wrong}
    tied, other = agree_on_ties(replies, state.tied)
    replies = {pid: reply for pid, reply in replies.items() if pid not in other}
    return Usable(replies, {**failures, **wrong, **other}, agreed, tied)


def agree_on_buffers(
    buffers: Mapping[int, frozenset[str]], known: frozenset[str] | None
) -> tuple[frozenset[str] | None, dict[int, str]]:
    """Return (the arrays that are not trained, reasons against the clients that say otherwise).

    `known` is what earlier rounds agreed on. Without it the majority decides; a tie is everybody's
    failure, since averaging models that train different parameters would hide a mistake.
    """
    if known is None:
        ranking = Counter(buffers.values()).most_common(2)
        if len(ranking) == 1 or (len(ranking) == 2 and ranking[0][1] > ranking[1][1]):
            known = ranking[0][0]
    wrong = {}
    for pid, mine in buffers.items():
        if known is None:
            wrong[pid] = "the clients disagree, half against half, on which parameters they train"
        elif mine != known:
            wrong[pid] = (
                f"client {pid} trains other parameters than the others; they differ in "
                f"{sorted(mine ^ known)}"
            )
    return known, wrong


def agree_on_ties(
    replies: Mapping[int, Reply], known: Mapping[str, str] | None
) -> tuple[Mapping[str, str] | None, dict[int, str]]:
    """Return (which weights are tied, reasons against the clients that say otherwise).

    `known` is what earlier rounds agreed on; without it the majority decides, or the lowest partition id:
    clients that differ here, but not in what they train, have built one model in two orders.
    """
    if known is None and replies:
        said = Counter(tuple(sorted(replies[pid].tied.items())) for pid in sorted(replies))
        known = dict(said.most_common(1)[0][0])
    return known, {
        pid: f"client {pid} ties other weights than the others: {dict(r.tied)}, not {dict(known or {})}"
        for pid, r in replies.items()
        if r.tied != known
    }


def with_common_metrics(metrics: Iterable[MetricRecord]) -> list[RecordDict]:
    """Keep the single numbers that every client reports: Flower's mean refuses anything else."""
    single = [{k: v for k, v in m.items() if isinstance(v, int | float)} for m in metrics]
    common = sorted(set.intersection(*(set(m) for m in single)))
    return [RecordDict({keys.METRICS: MetricRecord({k: m[k] for k in common})}) for m in single]
