"""The work of a client's app that needs no model: identity, precision, downlink, what the node keeps.

`node_mod` is the outermost mod. It makes the message plain, so that the user's mods see the global model in
float32 and nothing beside it. What else came waits in ``Context.state`` under `BESIDE`. :func:`opened`
gives it to the code inside, with what the client remembers; :func:`closed` takes what it leaves.

Loaded in every ClientApp process, before the user's `client_fn` runs: no torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import DEBUG, INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.common import log

from flwr_regs.flower.compat import ClientAppCallable, ErrorCode
from flwr_regs.flower.refusal import refusal
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ForeignStrategy, ProtocolError
from flwr_regs.wire.delta import KINDS, OutOfSync, model_from
from flwr_regs.wire.errors import described
from flwr_regs.wire.precision import from_half, to_half
from flwr_regs.wire.records import arrays_in, from_record, identity_reply, to_record

BESIDE = "flwr_regs.beside."
"""Begins the names under which records wait in ``Context.state`` while a message is served."""
_LOGGED: set[str] = set()


def node_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Do the work that needs no model, as the outermost mod.

    If the code inside refuses the message because it needs a strategy of this package, the reply ends the
    server's run. If it raises anything else, the reply is an error that names the user's line, and
    ``Context.state`` stays as it was; Flower would log a traceback for each client, and send the
    exception's text alone.
    """
    message_type = message.metadata.message_type
    if message_type == keys.IDENTIFY:
        return Message(identity_reply(context.node_config), reply_to=message)
    content = message.content
    config = _config(content)
    try:
        check_incoming(config, context)
    except ValueError as error:
        return failure(message, error)
    state = NodeState(context, config)
    if message_type == keys.PREFETCH:
        state.keep_model(_arrays(content))
        return Message(RecordDict(), reply_to=message)
    if message_type != keys.PROBE and message_type.split(".")[0] not in ("train", "evaluate"):
        return call_next(message, context)
    older = any(key.startswith(("fitins.", "evaluateins.")) for key in content)
    before = {key: record.copy() for key, record in context.state.items()}
    try:
        _make_plain(content, config, state)
        given = content.get(keys.ARRAYS)
        for name in arrays_in(content):
            if name.endswith(".broadcast") or name == keys.STEP:
                context.state[BESIDE + name] = content.pop(name)
        reply = call_next(message, context)
        beside = _taken(context)
        if reply.has_error() or message_type.startswith("evaluate"):
            return reply
        if keys.HALF_KEY in config and keys.ARRAYS in reply.content:
            fitted = from_record(_arrays(reply.content))
            halved, marks = to_half(fitted, str(config[keys.HALF_KEY]))
            reply.content[keys.ARRAYS] = to_record(halved)
            reply.content[keys.CONFIG] = ConfigRecord(
                {**_config(reply.content), keys.HALVES_KEY: marks[keys.HALVES_KEY]}
            )
        model = beside.get(keys.MODEL, given)
        if config.get(keys.KEEP_KEY) and isinstance(model, ArrayRecord):
            state.keep_model(model)
        return reply
    except OutOfSync:  # the server then sends the model
        message.metadata.message_type = message_type
        out_of_sync = ConfigRecord({keys.OUT_OF_SYNC_KEY: True})
        return Message(RecordDict({keys.CONFIG: out_of_sync}), reply_to=message)
    except ForeignStrategy as error:
        message.metadata.message_type = message_type
        return refusal(message, str(error), older)
    except Exception as error:  # whatever the user's code raises
        message.metadata.message_type = message_type
        context.state = RecordDict(before)
        return failure(message, error)


def check_incoming(config: Mapping[str, Any], context: Context) -> None:
    """Raise ProtocolError for a config that would reach another client's state, or replace this one's."""
    start = config.get(keys.START_KEY)
    if start is not None and not keys.is_start(start):
        raise ProtocolError(
            f"'{keys.START_KEY}' must be some hexadecimal digits, not {start!r:.80}"
        )
    mine = context.node_config.get("partition-id")
    if keys.CLIENT_KEY in config and mine is not None and config[keys.CLIENT_KEY] != int(mine):
        raise ProtocolError(
            f"the message is for partition {config[keys.CLIENT_KEY]!r:.80}, but this node serves {mine!r}"
        )


def failure(message: Message, error: Exception) -> Message:
    """Return the reply of a client that raised `error`: what it was, and the user's line."""
    why = described(error)
    if why not in _LOGGED:  # a process may run many clients
        _LOGGED.add(why)
        log(INFO, "a client failed: %s", why)
    log(DEBUG, "the traceback of a client that failed", exc_info=error)
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, why), reply_to=message)


def _make_plain(content: RecordDict, config: ConfigRecord, state: NodeState) -> None:
    """Put the global model in float32 in place of what travels; raise OutOfSync if it cannot be rebuilt.

    Of coded steps, which only the method can decode, it is the model that this client kept.
    """
    if keys.HALVES_KEY in config:
        in_full = from_half(from_record(_arrays(content)), config)
        content[keys.ARRAYS] = to_record(in_full)
        del config[keys.HALVES_KEY]
    if config.get(keys.DOWNLINK_KEY) in KINDS:
        kept = state.model(config[keys.BASE_ROUND_KEY])
        base = None if kept is None else from_record(kept)
        rebuilt, step = model_from(config, from_record(_arrays(content)), base)
        content[keys.ARRAYS] = to_record(rebuilt)
        if step is not None:
            content[keys.STEP] = to_record(step)


def opened(message: Message, context: Context) -> dict[str, Any]:
    """Return what came beside the arrays: broadcasts, the last step, what the client remembers."""
    state = NodeState(context, _config(message.content))
    return {**_taken(context), keys.MEMORY: state.memory}


def closed(message: Message, context: Context, left: Mapping[str, Any]) -> None:
    """Keep what the code inside has `left` for the next round: its memory, and a model that came coded."""
    if keys.MEMORY in left:
        NodeState(context, _config(message.content)).remember(left[keys.MEMORY])
    if keys.MODEL in left:
        context.state[BESIDE + keys.MODEL] = left[keys.MODEL]


def _taken(context: Context) -> dict[str, Any]:
    """Take the records that wait in ``Context.state``."""
    names = [key for key in context.state if key.startswith(BESIDE)]
    return {key.removeprefix(BESIDE): context.state.pop(key) for key in names}


def _config(content: RecordDict) -> ConfigRecord:
    config = content.get(keys.CONFIG)
    return config if isinstance(config, ConfigRecord) else ConfigRecord()


def _arrays(content: RecordDict) -> ArrayRecord:
    return arrays_in(content)[keys.ARRAYS]


class NodeState:
    """What a node keeps for its client in ``Context.state``: its memory, and a model for the next downlink.

    Keys are ``flwr_regs.<method>.<run id>.<start>.<what>``. `start` identifies one training, so that a
    second one in the same run does not read the first one's state.
    """

    def __init__(self, context: Context, config: Mapping[str, Any]) -> None:
        self._records = context.state
        self._round = config.get(keys.ROUND_KEY, 0)
        method, start = config.get(keys.METHOD_KEY), config.get(keys.START_KEY)
        self._prefix = f"flwr_regs.{method}.{context.run_id}.{start}."

    @property
    def memory(self) -> dict[str, bytes]:
        """What the client remembers: label -> snapshot."""
        record = self._records.get(self._prefix + keys.MEMORY)
        return dict(record) if isinstance(record, ConfigRecord) else {}  # type: ignore[arg-type]

    def remember(self, memory: Mapping[str, bytes]) -> None:
        """Keep what the client remembers from now on, in place of all that it did."""
        self._forget()
        self._records.pop(self._prefix + keys.MEMORY, None)
        if memory:
            self._records[self._prefix + keys.MEMORY] = ConfigRecord({**memory})

    def model(self, server_round: Any) -> ArrayRecord | None:
        """Return the record of the global model of `server_round`, if this client kept it."""
        kept = self._records.get(self._prefix + "round")
        if not isinstance(kept, ConfigRecord) or kept["round"] != server_round:
            return None
        record = self._records[self._prefix + keys.MODEL]
        return record if isinstance(record, ArrayRecord) else None

    def keep_model(self, model: ArrayRecord) -> None:
        """Keep the global model of this round."""
        self._forget()
        self._records[self._prefix + keys.MODEL] = model
        self._records[self._prefix + "round"] = ConfigRecord({"round": self._round})

    def _forget(self) -> None:
        """Drop what earlier trainings left; never the user's."""
        ours = (self._prefix, BESIDE)
        for key in [k for k in self._records if k.startswith("flwr_regs.")]:
            if not key.startswith(ours):
                del self._records[key]
