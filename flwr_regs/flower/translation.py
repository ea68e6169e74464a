"""Translates messages for a NumPyClient: from the Message API to Flower's older layout, and back.

Loaded in every ClientApp process, before the user's `client_fn` runs: no torch here.
"""

from __future__ import annotations

import json
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import MessageTypeLegacy

from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ForeignStrategy, ProtocolError
from flwr_regs.wire.records import read_entry, relabelled, sorted_entries
from flwr_regs.wire.text import read_json

_OLDER = "it comes from an older server: wrap its strategy in flwr_regs.LegacyStrategy"
_LEGACY = {"train": ("fitins", "fitres"), "evaluate": ("evaluateins", "evaluateres")}


def numpyclient_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Translate a train or evaluate message for a NumPyClient, and its reply back."""
    message_type = message.metadata.message_type
    if message_type == keys.LABELS:
        return _label_counts(message, context, call_next)
    kind = "train" if message_type == keys.PROBE else message_type.split(".")[0]
    if kind not in _LEGACY:
        older = message_type in (MessageTypeLegacy.GET_PARAMETERS, MessageTypeLegacy.GET_PROPERTIES)
        hint = f"; {_OLDER}" if older else ""
        raise ProtocolError(f"a NumPyClient can train and evaluate, not '{message_type}'{hint}")
    ins, res = _LEGACY[kind]
    if keys.ARRAYS not in message.content.array_records:
        why = f"the {kind} message holds no ArrayRecord '{keys.ARRAYS}', only {sorted(message.content)}"
        if any(key.startswith(f"{ins}.") for key in message.content):
            why += f"; {_OLDER}"
        raise ForeignStrategy(why)
    arrays = message.content.array_records[keys.ARRAYS]
    names = list(arrays)
    for name, array in arrays.items():  # Flower's own reader would take a zip file, too
        read_entry(name, array)
    config = ConfigRecord({**message.content.config_records.get(keys.CONFIG, {})})
    if lists := sorted(key for key, value in config.items() if isinstance(value, list)):
        raise ProtocolError(
            f"the config holds lists in {lists}, which Flower gives no NumPyClient: send text, such as "
            "json.dumps(...)"
        )
    config[keys.NAMES_KEY] = json.dumps(names)
    message.content = RecordDict({f"{ins}.parameters": arrays, f"{ins}.config": config})
    message.metadata.message_type = kind
    reply = call_next(message, context)
    reply.metadata.message_type = message_type
    content = reply.content
    status = content.config_records[f"{res}.status"]
    if status["code"] != 0:
        raise RuntimeError(f"the client's {kind} failed: {status['message']!r}")

    given = content.config_records[f"{res}.metrics"]
    if keys.REFUSED_KEY in given:
        raise ForeignStrategy(str(given[keys.REFUSED_KEY]))
    metrics: dict[str, Any] = dict(content.metric_records[f"{res}.num_examples"])
    metrics["num-examples"] = metrics.pop("num_examples")
    records, numbers, texts = sorted_entries(given)
    metrics = {**numbers, **metrics}  # n_k is fit's second value, even if its metrics hold another
    if message_type == keys.PROBE:
        pass  # no model goes back
    elif kind == "train":
        fitted = content.array_records[f"{res}.parameters"]
        sent = read_json(texts.pop(keys.SENT_KEY)) if keys.SENT_KEY in texts else names
        if sent and len(fitted) != len(sent):  # without arrays Flower adds a placeholder
            raise ProtocolError(
                f"fit returned {len(fitted)} arrays, but {len(sent)} names for them: {sent}"
            )
        records[keys.ARRAYS] = ArrayRecord(
            {name: relabelled(name, a) for name, a in zip(sent, fitted.values(), strict=False)}
        )
    else:
        metrics["loss"] = content.metric_records[f"{res}.loss"]["loss"]
    records[keys.METRICS] = MetricRecord(metrics)
    if texts:
        records[keys.CONFIG] = ConfigRecord(texts)
    reply.content = RecordDict(records)
    return reply


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
