"""The work of a client's app that needs no model: identity, precision, downlink, what the node keeps.

`node_mod` is the outermost mod. It makes the message plain, so that the user's mods see the global model in
float32 and nothing beside it. What else came waits in ``Context.state`` under `BESIDE`. :func:`opened`
gives it to the code inside, with what the client remembers; :func:`closed` takes what it leaves, which
waits there too. So a mod may call the code inside again, and it begins as it did the first time.

Another strategy's message is refused by a reply that ends the server's run. Flower's own strategies leave
out clients that reply with an error; if all do, the run "completes" with the initial model. So the reply
holds an array that nobody can read, whose header is the reason. Flower then raises ``ValueError: Cannot
parse header: 'refused by the client: ...'`` where it averages. An evaluation's refusal holds no metrics,
which Flower's strategies of the Message API also take for an error.

`guarded` puts guards around Flower's privacy mods.

Loaded in every ClientApp process, before the user's `client_fn` runs: no torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import DEBUG, ERROR, INFO
from numbers import Integral
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import mod as of_message_api
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.common import log

from flwr_regs.flower.compat import ClientAppCallable, ErrorCode, Mod
from flwr_regs.term import Range
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ForeignStrategy, ProtocolError, statistics
from flwr_regs.wire.delta import WHOLE, OutOfSync, model_from
from flwr_regs.wire.errors import described
from flwr_regs.wire.precision import narrow
from flwr_regs.wire.records import arrays_in, identity, refusal, to_record, views_of

Memory = Mapping[str, bytes]
BESIDE = "flwr_regs.beside."
"""Begins the names under which records wait in ``Context.state`` while a message is served."""
INT64 = Range("a whole number of 0 to 2**63 - 1", lambda v: 0 <= v < 2**63, Integral)
DOWNLINKS = {
    WHOLE: (),
    "kept": (keys.DIGEST_KEY,),
    "delta": (keys.DIGEST_KEY, keys.PREVIOUS_LR_KEY),
    "coded": (keys.DIGEST_KEY, keys.PREVIOUS_LR_KEY, keys.STEPS_KEY),
}
"""What ``regs.downlink`` may be -> the entries that such a message cannot do without."""
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
        return told(message, identity(context.node_config))
    before = copied(context.state)
    try:
        check_incoming(_config(message.content), context)
        return _served(message, context, call_next)
    except OutOfSync:  # the server then sends the model
        context.state = before
        return told(message, {keys.MEMORY_KEY: [keys.LOST_MODEL]})
    except ForeignStrategy as error:
        context.state = before
        log(ERROR, "%s", error)
        trains, older = message_type.startswith("train"), of_older_server(message)
        content = refusal(str(error), older) if trains else RecordDict()
        return Message(content, reply_to=message)
    except Exception as error:  # whatever the user's code raises
        context.state = before
        return failure(message, error)


def _served(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Make a message plain, and its reply ready to travel; keep the model for a later downlink."""
    message_type, content = message.metadata.message_type, message.content
    config = _config(content)
    state, half = NodeState(context, config), config.get(keys.HALF_KEY)
    if message_type == keys.PREFETCH:
        state.keep(keys.MODEL, _arrays(content))
        return Message(RecordDict(), reply_to=message)
    if message_type != keys.PROBE and message_type.split(".")[0] not in ("train", "evaluate"):
        return call_next(message, context)
    if half or config.get(keys.DOWNLINK_KEY, WHOLE) != WHOLE:
        base = None if state.model is None else views_of(state.model)
        rebuilt, step = model_from(config, views_of(_arrays(content)), base)
        content[keys.ARRAYS] = to_record(rebuilt)  # without coded steps: a method decodes them
        if step is not None:
            content[keys.STEP] = to_record(step)
    given = content.get(keys.ARRAYS)
    waiting = [n for n in arrays_in(content) if n.endswith(".broadcast") or n == keys.STEP]
    for name in waiting:
        context.state[BESIDE + name] = content.pop(name)
    if waiting:
        content[keys.CONFIG] = ConfigRecord({**config, keys.WAITING_KEY: waiting})
    reply: Any = call_next(message, context)
    if not isinstance(reply, Message):
        returned = f"the app's {message_type} function, or a mod, returned {reply!r:.200}"
        raise TypeError(f"{returned}, expected a Message such as ClientRound.reply()")
    names = (keys.MEMORY, keys.MODEL, *waiting)
    left = {name: context.state.pop(BESIDE + name, None) for name in names}
    if reply.has_error():
        return reply
    if (memory := left[keys.MEMORY]) is not None:
        state.remember(dict(memory))  # type: ignore[arg-type]
    if message_type.startswith("evaluate"):
        return reply
    model = left[keys.MODEL] or given
    if half and keys.ARRAYS in reply.content:
        fitted = views_of(_arrays(reply.content))
        reply.content[keys.ARRAYS] = to_record(narrow(fitted, str(half)))
    if keys.DOWNLINK_KEY in config and isinstance(model, ArrayRecord):
        state.keep(keys.MODEL, model)
    return reply


def told(message: Message, entries: Mapping[str, Any]) -> Message:
    """Return a reply that holds a config alone."""
    return Message(RecordDict({keys.CONFIG: ConfigRecord({**entries})}), reply_to=message)


def copied(state: RecordDict) -> RecordDict:
    """Return copies of the records of a state."""
    return RecordDict({key: record.copy() for key, record in state.items()})


def check_incoming(config: Mapping[str, Any], context: Context) -> None:
    """Raise ProtocolError for a config that would reach another client's state, or replace this one's.

    Also for entries of the protocol that are missing, or of another kind.
    """
    downlink = config.get(keys.DOWNLINK_KEY, WHOLE)
    if downlink not in [*DOWNLINKS]:  # a list has no hash
        must = f"'{keys.DOWNLINK_KEY}' must be one of {', '.join(DOWNLINKS)}"
        raise ProtocolError(f"{must}, not {downlink!r:.80}")
    if missing := [key for key in DOWNLINKS[downlink] if key not in config]:
        raise ProtocolError(
            f"a message whose '{keys.DOWNLINK_KEY}' is '{downlink}' lacks {missing}"
        )
    for key in (keys.ROUND_KEY, keys.SEED_KEY, keys.CLIENT_KEY):
        if key in config and not INT64.fits(config[key]):
            raise ProtocolError(f"'{key}' must be {INT64.expected}, not {config[key]!r:.80}")
    rate = config.get(keys.PREVIOUS_LR_KEY, 0.0)
    if not isinstance(rate, float | int) or rate < 0:  # NaN: the clients choose it
        must = f"'{keys.PREVIOUS_LR_KEY}' must be a number of at least 0"
        raise ProtocolError(f"{must}, not {rate!r:.80}")
    rounds = config.get(keys.SNAPSHOTS_KEY, [0])
    if (
        not isinstance(rounds, list)
        or len(rounds) not in (1, 2)
        or not all(map(INT64.fits, rounds))
    ):
        must = f"'{keys.SNAPSHOTS_KEY}' must be one or two rounds"
        raise ProtocolError(f"{must}, not {rounds!r:.80}")
    start = config.get(keys.START_KEY)
    if start is not None and not keys.is_start(start):
        raise ProtocolError(f"'{keys.START_KEY}' must be hexadecimal digits, not {start!r:.80}")
    served = context.node_config.get("partition-id", keys.stand_in(context.node_id))
    meant = config.get(keys.CLIENT_KEY)
    if meant is not None and meant != int(served):
        but = f"this node serves {served!r}"
        raise ProtocolError(f"the message is for partition {meant!r:.80}, but {but}")


def failure(message: Message, error: Exception) -> Message:
    """Return the reply of a client that raised `error`: what it was, and the user's line."""
    why = described(error)
    if why not in _LOGGED:  # a process may run many clients
        _LOGGED.add(why)
        log(INFO, "a client failed: %s", why)
    log(DEBUG, "the traceback of a client that failed", exc_info=error)
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, why), reply_to=message)


def of_older_server(message: Message) -> bool:
    """Whether a message comes from Flower's older server."""
    return any(key.startswith(("fitins.", "evaluateins.")) for key in message.content)


def opened(message: Message, context: Context) -> tuple[RecordDict, dict[str, bytes]]:
    """Return (a message with what came beside the model, what the client remembers).

    Raises ProtocolError if what came beside the model is gone.
    """
    config = _config(message.content)
    waiting: Any = config.get(keys.WAITING_KEY, [])
    # a mod may have made a new config without that list: what waits is taken all the same
    there = {n.removeprefix(BESIDE): r for n, r in context.state.items() if n.startswith(BESIDE)}
    beside = {n: record for n, record in there.items() if n not in (keys.MEMORY, keys.MODEL)}
    if missing := sorted({*waiting} - beside.keys()):
        why = f"a mod has replaced or emptied Context.state, where {missing} of the message waited"
        raise ProtocolError(f"{why}: keep its entries that begin with 'flwr_regs.'")
    content = RecordDict({**message.content, **beside})
    if waiting:
        rest = {key: value for key, value in config.items() if key != keys.WAITING_KEY}
        content[keys.CONFIG] = ConfigRecord(rest)
    return content, NodeState(context, config).memory


def closed(
    message: Message, context: Context, memory: Memory | None, model: ArrayRecord | None = None
) -> None:
    """Keep what the code inside leaves for the next round: its memory, and a model that came coded."""
    if memory is not None:
        context.state[BESIDE + keys.MEMORY] = ConfigRecord({**memory})
    if model is not None:
        context.state[BESIDE + keys.MODEL] = model


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
        self._context = context
        method, start = config.get(keys.METHOD_KEY), config.get(keys.START_KEY)
        self.prefix = f"flwr_regs.{method}.{context.run_id}.{start}."

    @property
    def memory(self) -> dict[str, bytes]:
        """What the client remembers: label -> snapshot."""
        record = self._context.state.get(self.prefix + keys.MEMORY)
        return dict(record) if isinstance(record, ConfigRecord) else {}  # type: ignore[arg-type]

    @property
    def model(self) -> ArrayRecord | None:
        """The global model that this client kept last."""
        record = self._context.state.get(self.prefix + keys.MODEL)
        return record if isinstance(record, ArrayRecord) else None

    def remember(self, memory: Memory) -> None:
        """Keep what the client remembers from now on, in place of all that it did."""
        self.keep(keys.MEMORY, ConfigRecord({**memory}) if memory else None)

    def keep(self, what: str, record: ArrayRecord | ConfigRecord | None) -> None:
        """Keep a record in place of an earlier one, and drop what earlier trainings left."""
        state, ours = self._context.state, (self.prefix, BESIDE)
        left = [k for k in state if k.startswith("flwr_regs.") and not k.startswith(ours)]
        for key in [*left, self.prefix + what]:  # never the user's
            state.pop(key, None)
        if record is not None:
            state[self.prefix + what] = record


# privacy mods

CLIPPING = (fixedclipping_mod, adaptiveclipping_mod)


def guarded(mods: Sequence[Mod]) -> list[Mod]:
    """Return `mods`, with a guard around each of Flower's three privacy mods.

    These do not check a message's type, so evaluation would fail. They protect only the model. Other
    arrays (a term's upload, a probe) would fail after the client has trained; a coded update, in a config,
    would pass unseen. So only train messages reach them, and only of methods that they can protect.

    Raises
    ------
    TypeError
        A privacy mod of ``flwr.client.mod``, which reads an older message layout.
    """
    for mod in mods:
        home = getattr(mod, "__module__", None) or type(mod).__module__
        if home.startswith("flwr.client.mod"):
            remedy = "use the one of flwr.clientapp.mod"
            if not hasattr(of_message_api, _name_of(mod)):  # such as secure aggregation
                remedy = "flwr.clientapp.mod has none in its place (docs/privacy.md)"
            older = f"{_name_of(mod)} of flwr.client.mod reads an older message layout"
            raise TypeError(f"{older}; {remedy}")
    return [_guard(m) if m in CLIPPING or isinstance(m, LocalDpMod) else m for m in mods]


def _guard(mod: Mod) -> Mod:
    def guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        def refuse(why: str) -> Message:
            why = f"{_name_of(mod)} does not go with {why}"
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, why), reply_to=message)

        message_type = message.metadata.message_type
        if message_type == keys.PROBE:
            return refuse("a method that asks clients before they train (RFedAvgPlus, Mime)")
        if message_type.split(".")[0] != "train":
            return call_next(message, context)
        if beside := _config(message.content).get(keys.BESIDE_KEY):
            why = "which needs more of a client than its update: that stays unprotected"
            return refuse(f"{beside!r}, {why}")
        if running := statistics(arrays_in(message.content).get(keys.ARRAYS) or ()):
            why = "which noise would ruin: use GroupNorm, or FedBN, which keeps them here"
            return refuse(f"BatchNorm's statistics {running}, {why}")
        if mod in CLIPPING and "clipping_norm" not in _config(message.content):
            needs = "it needs that, and a strategy with privacy=CentralDP(...) (docs/privacy.md)"
            return refuse(f"a train_config without 'clipping_norm': {needs}")
        inner: list[Message] = []

        def checked(message: Message, context: Context) -> Message:
            reply = call_next(message, context)
            inner.append(reply)
            if reply.has_error():
                return reply
            more = sorted(arrays_in(reply.content).keys() - {keys.ARRAYS})
            more += [keys.STEPS_KEY] * (keys.STEPS_KEY in _config(reply.content))
            sends = f"a client that sends {more} beside its model: that stays unprotected"
            return refuse(sends) if more else reply

        try:
            return mod(message, context, checked)
        except ZeroDivisionError:  # Flower's, of an update of length 0
            if not inner:  # no: the client's own
                raise
            metrics: Any = inner[-1].content.get(keys.METRICS) or {}
            if metrics.get("local-steps") == 0:  # it holds nothing of the data
                return inner[-1]
            return refuse("an update of length 0")

    return guard


def _name_of(mod: Any) -> str:
    return str(getattr(mod, "__name__", type(mod).__name__))
