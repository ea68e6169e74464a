"""Translates messages for a NumPyClient: from the Message API to Flower's older layout, and back.

Loaded in every ClientApp process, before the user's `client_fn` runs: no torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import MessageTypeLegacy

from flwr_regs.flower.compat import ClientAppCallable
from flwr_regs.flower.node import closed, opened
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ForeignStrategy, NDArrays, ProtocolError, pack
from flwr_regs.wire.records import from_record, labelled, read_entry, record_of, sorted_entries
from flwr_regs.wire.text import names_text, read_json

_OLDER = "it comes from Flower's older server: use ServerApp with @app.main and strategy.start"
Make = Callable[[Context], NumPyClient | Client]
Called = tuple[list[Any], dict[str, Any], Mapping[str, Any]]
"""The arrays that a client returned (or their ``.npy``), what it measured, and its metrics."""
_METHODS = {"train": "fit", "evaluate": "evaluate"}
_LEGACY = {"train": ("fitins", "fitres"), "evaluate": ("evaluateins", "evaluateres")}


def numpyclient_mod(
    make: Make, message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Translate a train or evaluate message for the client that `make` returns, and its reply back.

    A NumPyClient is called here. Flower's own way to it, which writes and reads every array once more, is
    for other clients, and for one that says itself how it is called (`to_client`).
    """
    message_type = message.metadata.message_type
    if message_type == keys.LABELS:
        return _label_counts(message, context, call_next)
    kind = "train" if message_type == keys.PROBE else message_type.split(".")[0]
    if kind not in _LEGACY:
        older = message_type in (MessageTypeLegacy.GET_PARAMETERS, MessageTypeLegacy.GET_PROPERTIES)
        hint = f"; {_OLDER}" if older else ""
        raise ProtocolError(f"a NumPyClient can train and evaluate, not '{message_type}'{hint}")
    beside = opened(message, context)
    arrays, config = _checked(message.content, kind)
    client = make(context)
    if getattr(client, "takes_records", False):
        config |= beside
    else:  # Flower's configs hold no records
        del beside[keys.MEMORY]
        config |= {name: pack(from_record(record)) for name, record in beside.items()}
    if lists := sorted(
        key for key, v in config.items() if isinstance(v, list) and key != keys.STEPS_KEY
    ):
        raise ProtocolError(
            f"the config holds lists in {lists}, which Flower gives no NumPyClient: send text, such as "
            "json.dumps(...)"
        )
    if _is_plain(client, kind):
        fitted, measured, given = _called(client, kind, arrays, config)
    else:
        fitted, measured, given = _called_by_flower(client, kind, message, context, config)
    closed(message, context, given)
    records, numbers, texts = sorted_entries(given)
    if message_type != keys.PROBE and kind == "train":  # after a probe, no model goes back
        sent = read_json(texts.pop(keys.SENT_KEY)) if keys.SENT_KEY in texts else list(arrays)
        if sent and len(fitted) != len(sent):
            raise ProtocolError(
                f"fit returned {len(fitted)} arrays, but {len(sent)} names for them: {sent}"
            )
        named = zip(sent, fitted, strict=False)
        records[keys.ARRAYS] = record_of({name: labelled(name, data) for name, data in named})
    # n_k is fit's second value, even if its metrics hold another
    records[keys.METRICS] = MetricRecord({**numbers, **measured})
    if texts:
        records[keys.CONFIG] = ConfigRecord(texts)
    return Message(RecordDict(records), reply_to=message)


def _checked(content: RecordDict, kind: str) -> tuple[NDArrays, dict[str, Any]]:
    """Return (the model's arrays as views of their bytes, the config with their names)."""
    record, entries = content.get(keys.ARRAYS), content.get(keys.CONFIG)
    if not isinstance(record, ArrayRecord):
        why = f"the {kind} message holds no ArrayRecord '{keys.ARRAYS}', only {sorted(content)}"
        if any(key.startswith(f"{_LEGACY[kind][0]}.") for key in content):
            why += f"; {_OLDER}"
        raise ForeignStrategy(why)
    # Flower's own reader would take a zip file, too
    arrays = {n: read_entry(n, a) for n, a in record.items()}
    config: dict[str, Any] = dict(entries.items()) if isinstance(entries, ConfigRecord) else {}
    config[keys.NAMES_KEY] = names_text(tuple(arrays))
    return arrays, config


def _is_plain(client: NumPyClient | Client, kind: str) -> bool:
    """Whether Flower would call this client's `fit` or `evaluate` and nothing else.

    A client of this package is always called so: Flower's own way carries no records.
    """
    if getattr(client, "takes_records", False):
        return True
    method, home = _METHODS[kind], type(client).to_client.__module__
    return (
        isinstance(client, NumPyClient)
        and getattr(type(client), method) is not getattr(NumPyClient, method)
        and home.startswith(("flwr.", "flwr_regs."))
    )


def _called(client: Any, kind: str, arrays: NDArrays, config: dict[str, Any]) -> Called:
    """Call a NumPyClient; raise TypeError as Flower does if it returns something else."""
    method, first = _METHODS[kind], list if kind == "train" else float
    result = getattr(client, method)([a.copy(order="K") for a in arrays.values()], config)
    kinds = (first, int, dict)
    if len(result) != 3 or not all(map(isinstance, result, kinds)):
        raise TypeError(
            f"NumPyClient.{method} must return ({', '.join(k.__name__ for k in kinds)}), not "
            f"({', '.join(type(value).__name__ for value in result)})"
        )
    value, examples, given = result
    if kind == "train":
        return [np.asarray(a) for a in value], {"num-examples": examples}, given
    return [], {"num-examples": examples, "loss": value}, given


def _called_by_flower(
    client: NumPyClient | Client,
    kind: str,
    message: Message,
    context: Context,
    config: dict[str, Any],
) -> Called:
    """Call a client of any kind as Flower does; raise RuntimeError if it says that it failed."""

    def given(context: Context) -> Client:
        return client.to_client() if isinstance(client, NumPyClient) else client

    (ins, res), message_type, whole = _LEGACY[kind], message.metadata.message_type, message.content
    parameters = whole.array_records[keys.ARRAYS]
    older: dict[str, Any] = {
        f"{ins}.parameters": parameters,
        f"{ins}.config": ConfigRecord(config),
    }
    message.content, message.metadata.message_type = RecordDict(older), kind
    try:
        content = ClientApp(given)(message, context).content
    finally:
        message.content, message.metadata.message_type = whole, message_type
    status = content.config_records[f"{res}.status"]
    if status["code"] != 0:
        raise RuntimeError(f"the client's {kind} failed: {status['message']!r}")
    entries = content.config_records[f"{res}.metrics"]
    if keys.REFUSED_KEY in entries:
        raise ForeignStrategy(str(entries[keys.REFUSED_KEY]))
    measured = {"num-examples": content.metric_records[f"{res}.num_examples"]["num_examples"]}
    if kind == "train":
        fitted = content.array_records[f"{res}.parameters"]  # without arrays, Flower's placeholder
        return [a.data for a in fitted.values()], measured, entries
    return [], measured | {"loss": content.metric_records[f"{res}.loss"]["loss"]}, entries


def _label_counts(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Request the label counts from the client's ``get_properties``."""
    request = ConfigRecord({keys.LABELS_KEY: True})
    message.content = RecordDict({"getpropertiesins.config": request})
    message.metadata.message_type = MessageTypeLegacy.GET_PROPERTIES
    reply = call_next(message, context)
    reply.metadata.message_type = keys.LABELS
    counts = reply.content.config_records["getpropertiesres.properties"]
    reply.content = RecordDict({keys.CONFIG: counts})
    return reply
