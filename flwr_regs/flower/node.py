"""The work of a client's app that needs no model: identity, precision, downlink, client state.

Loaded in every ClientApp process, before the user's `client_fn` runs: no torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from logging import DEBUG, INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from flwr_regs.flower.refusal import refusal
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ForeignStrategy, NDArrays, ProtocolError, pack, unpack
from flwr_regs.wire.delta import KINDS, OutOfSync, model_from, packed_steps
from flwr_regs.wire.errors import described
from flwr_regs.wire.precision import from_half, to_half
from flwr_regs.wire.records import arrays_in, from_record, identity_reply, to_record

BEFORE = ".before"
AT_ONCE = (".always.client", keys.PRIVATE_KEY)
"""Ends of the names of slots that count at once, whether the server uses the round's reply or not."""
_UNTRAINED = {"round": -1, "earlier": -1, "probe": 0, "loaded": 0}
"""Of the last exchange: its round, the round trained before it, whether it was a probe, and whether it
began with what the client loaded from its disk: then what was before is there, not here."""
_LOGGED: set[str] = set()


def node_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Do the work that needs no model, as the outermost mod.

    The code inside (a NumPyClient, or your own loop) gets the global model in ``"arrays"``, in float32
    where it travels in half precision. Beside coded steps, which only the method can decode, it gets the
    model that this client kept. ``"config"`` holds the rest, with the terms' broadcasts and this
    client's slots as bytes under ``"<term>.broadcast"`` and ``"<term>.client"``. The reply holds new slots
    in the same way; they are kept in ``Context.state`` and do not travel. If the code inside refuses the
    message because it needs a strategy of this package, the reply ends the server's run. If it raises
    anything else, the reply is an error that names the user's line, and ``Context.state`` stays as it was;
    Flower would log a traceback for each client, and send the exception's text alone.
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
    kind = message_type.split(".")[0]
    if message_type != keys.PROBE and kind not in ("train", "evaluate"):
        return call_next(message, context)
    if keys.HALVES_KEY in config:
        in_full = from_half(from_record(_arrays(content)), config)
        content[keys.ARRAYS] = to_record(in_full)
        del config[keys.HALVES_KEY]
    older = any(key.startswith(("fitins.", "evaluateins.")) for key in content)
    before = {key: record.copy() for key, record in context.state.items()}
    try:
        return _served(message, context, call_next, state, config)
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
    ours = keys.METHOD_KEY in config  # another strategy's keys are the client's business
    own = [k for k in config if k.endswith(".client") and not k.startswith("user.")]
    if ours and (forged := sorted(own)):
        raise ProtocolError(f"the config holds {forged}, which a node keeps for itself alone")
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


def _served(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    state: NodeState,
    config: ConfigRecord,
) -> Message:
    """Return the reply of the code inside; raise OutOfSync if the model cannot be rebuilt."""
    content, kind = message.content, message.metadata.message_type.split(".")[0]
    if config.get(keys.DOWNLINK_KEY) in KINDS:
        # Before the user's mods run, which must see a model and not a step.
        base = state.model(config[keys.BASE_ROUND_KEY])
        rebuilt, step = model_from(config, from_record(_arrays(content)), base)
        content[keys.ARRAYS] = to_record(rebuilt)
        if step is not None:
            content[keys.STEP_KEY] = to_record(step)
        if keys.STEPS_KEY in config:  # only the method can decode these
            steps: Any = config[keys.STEPS_KEY]
            config[keys.STEPS_KEY] = packed_steps(steps)
    slots = state.slots() if kind == "evaluate" else state.entering()
    if kind == "evaluate":
        wanted = {keys.PRIVATE_KEY}
        if personal := str(config.get(keys.PERSONAL_KEY, "")):
            ends = ("client", "pending.client", "always.client")
            wanted |= {f"{t}.{end}" for t in personal.split(",") for end in ends}
            wanted.add(keys.PENDING_KEY)
        slots = {name: record for name, record in slots.items() if name in wanted}
    arrays = arrays_in(content)
    model = arrays.get(keys.ARRAYS)
    for name in arrays:
        if name.endswith(".broadcast") or name == keys.STEP_KEY:
            slots[name] = arrays[name]
            del content[name]
    packed = {name: pack(from_record(record)) for name, record in slots.items()}
    inside = config.copy()
    if keys.START_KEY in config:  # an evaluation too may need what this client saved
        mine = int(context.node_config.get("partition-id", context.node_id))
        inside.setdefault(keys.CLIENT_KEY, mine)
    inside.update({**packed, **state.known})
    content[keys.CONFIG] = inside

    reply = call_next(message, context)
    if reply.has_error() or kind == "evaluate":
        return reply
    entries = _config(reply.content)
    if keys.HALF_KEY in config and keys.ARRAYS in reply.content:
        fitted = from_record(_arrays(reply.content))
        halved, marks = to_half(fitted, str(config[keys.HALF_KEY]))
        reply.content[keys.ARRAYS] = to_record(halved)
        entries[keys.HALVES_KEY] = marks[keys.HALVES_KEY]
        reply.content[keys.CONFIG] = entries
    kept = [k for k, v in entries.items() if k.endswith(".client") and isinstance(v, bytes)]
    unpacked = {k: to_record(unpack(entries.pop(k))) for k in kept}  # type: ignore[arg-type]
    if keys.MODEL_KEY in unpacked:
        model = unpacked.pop(keys.MODEL_KEY)
    if state.ahead and any(name.endswith(AT_ONCE) for name in slots):
        entries[keys.AHEAD_KEY] = True
    state.keep_slots(unpacked, bool(entries.pop(keys.LOADED_KEY, False)))
    if config.get(keys.KEEP_KEY) and model is not None:
        state.keep_model(model)
    return reply


def _config(content: RecordDict) -> ConfigRecord:
    found = content.get(keys.CONFIG)
    return found if isinstance(found, ConfigRecord) else ConfigRecord()


def _arrays(content: RecordDict) -> ArrayRecord:
    return arrays_in(content)[keys.ARRAYS]


@lru_cache(maxsize=16)  # many clients have the same ones; Flower checks what it makes anew
def _numbers(*values: int) -> ConfigRecord:
    """Return an entry of numbers, by the names of `_UNTRAINED`."""
    return ConfigRecord(dict(zip(_UNTRAINED, values, strict=True)))


class NodeState:
    """A client's memory between rounds, in ``Context.state``.

    Keys are ``flwr_regs.<method>.<run id>.<start>.<slot>``. `start` identifies one training, so that a
    second one in the same run does not read the first one's state.

    What counts at once (private entries, and slots of terms that keep ``"always"``) is there twice: as the
    last round left it, and under ``<slot>.before`` as it was before that round. A server that repeats a
    round, because it was resumed from a checkpoint or tries again, gets the client of that time. Other
    slots do not need this: see `client/memory/state.py`.
    """

    def __init__(self, context: Context, config: Mapping[str, Any]) -> None:
        self._records = context.state
        self._round = config.get(keys.ROUND_KEY, 0)
        self._probing = bool(config.get(keys.PROBE_KEY))
        method, start = config.get(keys.METHOD_KEY), config.get(keys.START_KEY)
        self._prefix = f"flwr_regs.{method}.{context.run_id}.{start}."
        trained = self._entry("trained") or _UNTRAINED
        values = (int(trained[k]) for k in _UNTRAINED)
        self._last, self._earlier, self._probed, self._loaded = values
        continues = self._round == self._last and self._probed and not self._probing
        self._repeats = self._round <= self._last and not continues
        self._begun = self._repeats or continues

    def slots(self, ending: str = ".client") -> dict[str, ArrayRecord]:
        """Return the client's slots by name, such as ``"<term>.client"``, as the last round left them."""
        n = len(self._prefix)
        return {
            key[n:].removesuffix(BEFORE): record
            for key, record in arrays_in(self._records).items()
            if key.startswith(self._prefix) and key.endswith(ending)
        }

    def _entry(self, name: str) -> Mapping[str, Any] | None:
        """Return an entry of numbers, if there is one."""
        found = self._records.get(self._prefix + name)
        return found if isinstance(found, ConfigRecord) else None

    @property
    def ahead(self) -> bool:
        """Whether what is kept depends on the message's round, or a later one."""
        return self._repeats and self._round <= self._earlier

    @property
    def known(self) -> dict[str, int]:
        """An entry with the last round that the client trained before this one; none if it is not known.

        A client that saves its state then looks on its disk.
        """
        if self._last < 0 or (self._repeats and self._loaded):
            return {}
        return {keys.LAST_KEY: self._earlier if self._begun else self._last}

    def entering(self) -> dict[str, ArrayRecord]:
        """Return the client's slots with which the message's round begins."""
        slots = self.slots()
        if not self._repeats:
            return slots
        others = {name: record for name, record in slots.items() if not name.endswith(AT_ONCE)}
        return others | self.slots(BEFORE)

    def model(self, server_round: Any) -> NDArrays | None:
        """Return the global model of `server_round`, if this client kept it."""
        record = self.kept_model(server_round)
        return None if record is None else from_record(record)

    def kept_model(self, server_round: Any) -> ArrayRecord | None:
        """Return the record of :meth:`model`."""
        kept = self._entry("round")
        if kept is None or kept["round"] != server_round:
            return None
        return arrays_in(self._records)[self._prefix + "model"]

    def keep_slots(self, slots: Mapping[str, ArrayRecord], loaded: bool = False) -> None:
        """Keep this round's slots instead of earlier ones; `loaded`: the round began with saved ones."""
        if self._begun:
            before, earlier, loaded = self.slots(BEFORE), self._earlier, loaded or self._loaded > 0
        else:
            old = self.slots()
            before = {name: record for name, record in old.items() if name.endswith(AT_ONCE)}
            earlier = self._last
        ours, trained = self._prefix, self._prefix + "trained"
        ends = (".client", BEFORE)
        self._forget(lambda k: not k.startswith(ours) or k.endswith(ends) or k == trained)
        if not slots and not before:
            return
        for name, record in slots.items():
            self._records[self._prefix + name] = record
        for name, record in before.items():
            self._records[self._prefix + name + BEFORE] = record
        values = (self._round, earlier, self._probing, loaded)
        self._records[trained] = _numbers(*map(int, values)).copy()

    def keep_model(self, model: ArrayRecord) -> None:
        """Keep the global model of this round."""
        self._forget(lambda key: not key.startswith(self._prefix))
        self._records[self._prefix + "model"] = model
        self._records[self._prefix + "round"] = ConfigRecord({"round": self._round})

    def _forget(self, condition: Callable[[str], bool]) -> None:
        """Drop our own keys that meet `condition`; never the user's."""
        for key in [k for k in self._records if k.startswith("flwr_regs.") and condition(k)]:
            del self._records[key]
