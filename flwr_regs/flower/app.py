"""`client_app`: a Flower ClientApp around a NumPyClient, for Message-API strategies.

Flower's ``ClientApp(client_fn)`` understands only the older message layout. Two mods bridge that:
the outer one answers the strategy's identity query, applies the ``"delta"`` downlink and keeps client
state in ``Context.state``; the inner one translates train and evaluate messages. Nothing heavy
is imported here: on a SuperNode every message starts a new process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.constant import MessageTypeLegacy

from flwr_regs.flower.mods import guarded
from flwr_regs.server.downlink import rebuild, rebuild_coded
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, ProtocolError, pack, unpack
from flwr_regs.wire.precision import from_half, to_half
from flwr_regs.wire.records import from_record, identity_reply, sorted_answer, to_record

_LEGACY = {"train": ("fitins", "fitres"), "evaluate": ("evaluateins", "evaluateres")}


def client_app(
    client_fn: Callable[[Context], NumPyClient | Client], mods: Sequence[Mod] = ()
) -> ClientApp:
    """Return a ClientApp that runs `client_fn`'s client under a Message-API strategy.

    Parameters
    ----------
    client_fn : callable
        ``client_fn(context) -> NumPyClient`` (or Client), called for each train or evaluate message;
        ``context.node_config["partition-id"]`` says whose data to load. Import heavy packages
        inside it.
    mods : sequence of Flower mods
        Run outside the translation: they see Message-API records. Flower's privacy mods
        (``flwr.clientapp.mod``) see train messages only, and refuse what they could not protect.

    Raises
    ------
    TypeError
        `client_fn` is not callable, or returned something else than a client (when called); a privacy mod
        for the older message layout.
    """
    if not callable(client_fn):
        raise TypeError(
            f"client_app needs a function context -> NumPyClient, not {type(client_fn).__name__}"
        )

    def checked(context: Context) -> Client:
        client = client_fn(context)
        if isinstance(client, NumPyClient):
            return client.to_client()
        if not isinstance(client, Client):
            raise TypeError(
                f"client_fn must return a NumPyClient or Client, not {type(client).__name__}"
            )
        return client

    return ClientApp(checked, mods=[node_mod, *guarded(mods), numpyclient_mod])


class RegClientApp(ClientApp):
    """A ClientApp for ``@app.train()`` functions of your own around :class:`flwr_regs.ClientRound`.

    Flower's, except that it does for every message what needs no model: see :func:`node_mod`.

    Parameters
    ----------
    mods : sequence of Flower mods
    label_counts : callable, optional
        ``label_counts(context)`` returns the examples of each class in this client's data, for a strategy
        with class-covering cohorts. That is information about the data: not told by default.
    """

    def __init__(
        self,
        mods: Sequence[Mod] = (),
        label_counts: Callable[[Context], Sequence[int]] | None = None,
    ) -> None:
        super().__init__(mods=guarded(mods))
        if label_counts is None:
            return

        @self.query(keys.LABELS.partition(".")[2])
        def tell(message: Message, context: Context) -> Message:
            counts = json.dumps([int(n) for n in label_counts(context)])
            answer = ConfigRecord({keys.LABELS_KEY: counts})
            return Message(RecordDict({keys.CONFIG: answer}), reply_to=message)

    def train(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> Callable[[ClientAppCallable], ClientAppCallable]:
        """Register a train function, as Flower's; Flower's privacy mods are kept to what they protect."""
        return super().train(action, mods=guarded(mods or ()))

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        return node_mod(message, context, self._inside)

    def _inside(self, message: Message, context: Context) -> Message:
        message_type = message.metadata.message_type
        if message_type == keys.PROBE:  # a train message that asks for no training
            message.metadata.message_type = "train"
        reply: Any = super().__call__(message, context)
        if not isinstance(reply, Message):
            raise TypeError(
                f"the app's {message_type} function returned {reply!r}, expected a Message such as "
                "ClientRound.reply()"
            )
        reply.metadata.message_type = message_type
        return reply


def node_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Do what needs no model, as the outermost mod: identity, precision, the downlink, client state.

    What lies inside, a NumPyClient or a training loop of your own, gets the global model in
    ``"arrays"``, in float32 where it travels in half precision, and all the rest in ``"config"``: terms'
    broadcasts and this client's slots as bytes under ``"<term>.broadcast"`` and ``"<term>.client"``. It
    answers with new slots in the same way; they are kept in ``Context.state`` and do not travel.
    """
    message_type = message.metadata.message_type
    if message_type == keys.IDENTIFY:
        return Message(identity_reply(context.node_config), reply_to=message)
    content = message.content
    config = content.config_records.get(keys.CONFIG, ConfigRecord())
    state = _State(context, config)
    if message_type == keys.PREFETCH:
        state.keep_model(content.array_records[keys.ARRAYS])
        return Message(RecordDict(), reply_to=message)
    kind = message_type.split(".")[0]
    if message_type != keys.PROBE and kind not in _LEGACY:
        return call_next(message, context)
    if keys.HALVES_KEY in config:
        in_full = from_half(from_record(content.array_records[keys.ARRAYS]), config)
        content[keys.ARRAYS] = to_record(in_full)
        del config[keys.HALVES_KEY]
    if not _apply_step(content, config, state):
        out_of_sync = ConfigRecord({keys.OUT_OF_SYNC_KEY: True})
        return Message(RecordDict({keys.CONFIG: out_of_sync}), reply_to=message)
    slots = state.slots()
    if kind == "evaluate":
        slots = {name: record for name, record in slots.items() if name == keys.PRIVATE_KEY}
    for name in [
        n for n in content.array_records if n.endswith(".broadcast") or n == keys.STEP_KEY
    ]:
        slots[name] = content.array_records.pop(name)
    packed = {name: pack(from_record(record)) for name, record in slots.items()}
    content[keys.CONFIG] = ConfigRecord({**config, **packed})
    model = content.array_records.get(keys.ARRAYS)

    reply = call_next(message, context)
    if reply.has_error() or kind == "evaluate":
        return reply
    answer = reply.content.config_records.get(keys.CONFIG, ConfigRecord())
    if keys.HALF_KEY in config and keys.ARRAYS in reply.content.array_records:
        fitted = from_record(reply.content.array_records[keys.ARRAYS])
        halved, told = to_half(fitted, str(config[keys.HALF_KEY]))
        reply.content[keys.ARRAYS] = to_record(halved)
        answer[keys.HALVES_KEY] = told[keys.HALVES_KEY]
        reply.content[keys.CONFIG] = answer
    kept = [k for k, v in answer.items() if k.endswith(".client") and isinstance(v, bytes)]
    unpacked = {k: to_record(unpack(answer.pop(k))) for k in kept}  # type: ignore[arg-type]
    if keys.PRIVATE_KEY in unpacked and keys.PRIVATE_KEY not in slots:
        answer[keys.FRESH_KEY] = True  # a server that knows better says that they were lost
    state.keep_slots(unpacked, instead=message_type != keys.PROBE)
    if config.get(keys.KEEP_KEY) and model is not None:
        state.keep_model(model)
    return reply


def _apply_step(content: RecordDict, config: ConfigRecord, state: _State) -> bool:
    """Turn what came on a ``"delta"`` downlink into the model; False if that is not possible.

    Here, outside the user's mods, so that they see the model and never take a step for one.
    """
    kind = config.get(keys.DOWNLINK_KEY)
    if kind not in ("delta", "ternary", "kept"):
        return True
    model = state.model(config[keys.BASE_ROUND_KEY])
    step = from_record(content.array_records[keys.ARRAYS])
    if kind == "delta":
        model = rebuild(model, step, str(config[keys.DIGEST_KEY]))
    if kind == "ternary":
        coded: Any = config.pop(keys.STEPS_KEY)
        buffers: Any = config.pop(keys.BUFFERS_KEY)
        tied = str(config.pop(keys.TIED_KEY, "{}"))
        model, step = rebuild_coded(model, coded, step, buffers, str(config[keys.DIGEST_KEY]), tied)
    if model is None:  # lost or stale: the server sends the full pair instead
        return False
    if kind != "kept":
        content[keys.STEP_KEY] = to_record(step)
    content[keys.ARRAYS] = to_record(model)
    return True


def numpyclient_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Translate a Message-API train or evaluate message for a NumPyClient, and its reply back."""
    message_type = message.metadata.message_type
    if message_type == keys.LABELS:
        return _label_counts(message, context, call_next)
    kind = "train" if message_type == keys.PROBE else message_type.split(".")[0]
    if kind not in _LEGACY:
        raise ProtocolError(f"a NumPyClient answers train and evaluate, not '{message_type}'")
    ins, res = _LEGACY[kind]
    if keys.ARRAYS not in message.content.array_records:
        older = any(key.startswith(f"{ins}.") for key in message.content)
        raise ProtocolError(
            f"the {kind} message holds no ArrayRecord '{keys.ARRAYS}', only {sorted(message.content)}"
            + older
            * "; it comes from an older server: wrap its strategy in flwr_regs.LegacyStrategy"
        )
    arrays = message.content.array_records[keys.ARRAYS]
    names = list(arrays)
    config = ConfigRecord({**message.content.config_records.get(keys.CONFIG, {})})
    config[keys.NAMES_KEY] = json.dumps(names)
    message.content = RecordDict({f"{ins}.parameters": arrays, f"{ins}.config": config})
    message.metadata.message_type = kind
    reply = call_next(message, context)
    reply.metadata.message_type = message_type
    content = reply.content
    status = content.config_records[f"{res}.status"]
    if status["code"] != 0:
        raise RuntimeError(f"the client's {kind} answered: {status['message']!r}")

    metrics: dict[str, Any] = dict(content.metric_records[f"{res}.num_examples"])
    metrics["num-examples"] = metrics.pop("num_examples")
    records, numbers, texts = sorted_answer(content.config_records[f"{res}.metrics"])
    metrics = {**numbers, **metrics}  # n_k is fit's second value, whatever the metrics say
    if message_type == keys.PROBE:
        pass  # no model goes back
    elif kind == "train":
        fitted = content.array_records[f"{res}.parameters"]
        sent = json.loads(texts.pop(keys.SENT_KEY)) if keys.SENT_KEY in texts else names
        if sent and len(fitted) != len(sent):  # Flower puts a placeholder for none
            raise ProtocolError(
                f"fit returned {len(fitted)} arrays, but {len(sent)} names for them: {sent}"
            )
        records[keys.ARRAYS] = ArrayRecord(
            {name: _relabel(a) for name, a in zip(sent, fitted.values(), strict=False)}
        )
    else:
        metrics["loss"] = content.metric_records[f"{res}.loss"]["loss"]
    records[keys.METRICS] = MetricRecord(metrics)
    if texts:
        records[keys.CONFIG] = ConfigRecord(texts)
    reply.content = RecordDict(records)
    return reply


def _label_counts(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Ask the client's ``get_properties`` for its label counts."""
    asked = ConfigRecord({keys.LABELS_KEY: True})
    message.content = RecordDict({"getpropertiesins.config": asked})
    message.metadata.message_type = MessageTypeLegacy.GET_PROPERTIES
    reply = call_next(message, context)
    reply.metadata.message_type = keys.LABELS
    answer = reply.content.config_records["getpropertiesres.properties"]
    reply.content = RecordDict({keys.CONFIG: answer})
    return reply


class _State:
    """A client's memory between rounds, in ``Context.state``.

    Keys are ``flwr_regs.<method>.<run id>.<start>.<slot>``: `start` is one call of the strategy's
    ``start``, so a second training in the same run never meets the first one's state.
    """

    def __init__(self, context: Context, config: Mapping[str, Any]) -> None:
        self._records = context.state
        self._round = config.get(keys.ROUND_KEY, 0)
        method, start = config.get(keys.METHOD_KEY), config.get(keys.START_KEY)
        self._prefix = f"flwr_regs.{method}.{context.run_id}.{start}."

    def slots(self) -> dict[str, ArrayRecord]:
        """Return the terms' client slots by ``"<term>.client"``."""
        n = len(self._prefix)
        return {
            key[n:]: record
            for key, record in self._records.array_records.items()
            if key.startswith(self._prefix) and key.endswith(".client")
        }

    def model(self, server_round: Any) -> NDArrays | None:
        """Return the global model this client trained from in `server_round`, if it kept it."""
        kept = self._records.config_records.get(self._prefix + "round")
        if kept is None or kept["round"] != server_round:
            return None
        return from_record(self._records.array_records[self._prefix + "model"])

    def keep_slots(self, slots: Mapping[str, ArrayRecord], instead: bool = True) -> None:
        """Keep the terms' client slots of this round, `instead` of all earlier ones or beside them."""
        self._forget(
            lambda key: not key.startswith(self._prefix) or (instead and key.endswith(".client"))
        )
        for name, record in slots.items():
            self._records[self._prefix + name] = record

    def keep_model(self, model: ArrayRecord) -> None:
        """Keep the global model of this round."""
        self._forget(lambda key: not key.startswith(self._prefix))
        self._records[self._prefix + "model"] = model
        self._records[self._prefix + "round"] = ConfigRecord({"round": self._round})

    def _forget(self, condition: Callable[[str], bool]) -> None:
        """Drop what `condition` names: among our own keys only, never the user's."""
        for key in [k for k in self._records if k.startswith("flwr_regs.") and condition(k)]:
            del self._records[key]


def _relabel(array: Array) -> Array:
    """Give a legacy Array (dtype "", shape ()) its dtype and shape back, without copying the data."""
    head = BytesIO(array.data[:1024])
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, fortran, dtype = read[np.lib.format.read_magic(head)](head)
    if fortran:
        return Array(array.numpy())
    return Array(str(dtype), tuple(shape), "numpy.ndarray", array.data)
