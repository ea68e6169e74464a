"""`client_app`: a Flower ClientApp around a NumPyClient, for Message-API strategies; and `RegClientApp`.

Flower's ``ClientApp(client_fn)`` understands only the older message layout. Here node.py does the work that
needs no model, the user's mods follow, and innermost the client is called: one of this package with the
message as plain values, any other of Flower's as Flower calls it. Nothing heavy is imported here: on a
SuperNode every message starts a new process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Code, EvaluateIns, FitIns, GetPropertiesIns, Parameters

from flwr_regs.flower.compat import ClientAppCallable, Mod
from flwr_regs.flower.node import Memory, closed, guarded, node_mod, of_older_server, opened, told
from flwr_regs.term import SWITCH
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ForeignStrategy, ProtocolError, pack, unpack
from flwr_regs.wire.parcel import Parcel
from flwr_regs.wire.records import arrays_in, parcel_of, reply_of, to_record, view_of

METHODS = {"train": "fit", "evaluate": "evaluate"}
"""Kind of message -> the method of a NumPyClient."""
_OLDER = "it comes from Flower's older server: use ServerApp with @app.main and strategy.start"


class MessageContext(Context):
    """A node's context, as it is for the client of one message.

    Attributes
    ----------
    message_type : str
    config : mapping
        The message's config.
    """

    def __init__(self, context: Context, message_type: str, config: Mapping[str, Any]) -> None:
        vars(self).update(vars(context))  # the state is the node's own
        self.message_type, self.config = message_type, config


ClientFn = Callable[[MessageContext], NumPyClient | Client]
CountsFn = Callable[[Context], Sequence[int]]
Register = Callable[[ClientAppCallable], ClientAppCallable]


def client_app(client_fn: ClientFn, mods: Sequence[Mod] = (), *, once: bool = True) -> ClientApp:
    """Return a ClientApp that runs `client_fn`'s client under a Message-API strategy.

    Parameters
    ----------
    client_fn : callable
        ``client_fn(context) -> NumPyClient`` (or Client), called for each train or evaluate message;
        ``context.node_config["partition-id"]`` names the data to load. Import heavy packages inside it.
    mods : sequence of Flower mods
        They see Message-API records. Flower's privacy mods (``flwr.clientapp.mod``) see only train
        messages, and refuse methods that they cannot protect. The server does not learn of a learning rate
        that a mod changes: SCAFFOLD, FedADC and FedFOR compute with the strategy's.
    once : bool
        A :class:`flwr_regs.StackedGrid` calls `client_fn` once for each client. False: for each message, as
        everywhere else; its ``context.config`` is the message's.

    Raises
    ------
    TypeError
        `client_fn` is not callable, or does not return a client; a privacy mod is for the older message
        layout.
    """
    if not callable(client_fn):
        raise TypeError(
            f"client_app needs a function context -> NumPyClient, not a {type(client_fn).__name__}"
        )
    SWITCH.check("client_app", "once", once)
    return NumPyClientApp(client_fn, mods, once)


class NumPyClientApp(ClientApp):
    """The app of :func:`client_app`, which says what it was made of; it can be pickled if that can."""

    def __init__(self, client_fn: ClientFn, mods: Sequence[Mod], once: bool) -> None:
        self.client_fn, self.own_mods, self.once = client_fn, tuple(mods), once
        unused: Any = lambda context: None  # noqa: E731  # `_serve` makes the client
        super().__init__(unused, mods=[node_mod, *guarded(mods), self._serve])

    def __reduce__(self) -> tuple[Any, ...]:
        return NumPyClientApp, (self.client_fn, self.own_mods, self.once)

    def made(
        self, context: Context, message_type: str, config: Mapping[str, Any]
    ) -> NumPyClient | Client:
        """Return the client of a message."""
        of_message = MessageContext(context, message_type, config)
        client = self.client_fn(of_message)
        context.state = of_message.state
        if not isinstance(client, NumPyClient | Client):
            given = type(client).__name__
            raise TypeError(f"client_fn must return a NumPyClient or Client, not {given}")
        inner: Any = getattr(client, "numpy_client", None)  # that a Client was made of
        return inner if hasattr(inner, "respond") else client

    def _serve(self, message: Message, context: Context, _: ClientAppCallable) -> Message:
        """Call the client, innermost; Flower's own way to it would write and read every array once more."""
        message_type = message.metadata.message_type
        if message_type == keys.LABELS:
            made: Any = self.made(context, message_type, {})
            called = made.to_client() if isinstance(made, NumPyClient) else made
            said = called.get_properties(GetPropertiesIns({keys.LABELS_KEY: True}))
            return told(message, said.properties)
        kind = "train" if message_type == keys.PROBE else message_type.split(".")[0]
        if kind not in METHODS:
            hint = f"; {_OLDER}" if message_type.startswith("get_") else ""
            raise ProtocolError(f"a NumPyClient can train and evaluate, not '{message_type}'{hint}")
        if not isinstance(message.content.get(keys.ARRAYS), ArrayRecord):
            why = f"the {kind} message holds no ArrayRecord '{keys.ARRAYS}', only {sorted(message.content)}"
            raise ForeignStrategy(f"{why}; {_OLDER}" if of_older_server(message) else why)
        content, memory = opened(message, context)
        parcel = parcel_of(content)
        entries = parcel.config.items()
        if lists := [k for k, v in entries if isinstance(v, list) and not k.startswith("regs.")]:
            why = "which Flower gives no NumPyClient: send text, such as json.dumps(...)"
            raise ProtocolError(f"the config holds lists in {lists}, {why}")
        client: Any = self.made(context, message_type, parcel.config)
        if not hasattr(client, "respond") or client.overrides(METHODS[kind]):
            return _called(client, kind, message, context, parcel, memory)
        reply, memory, model = client.respond(kind, parcel, memory)
        closed(message, context, memory, None if model is None else to_record(model))
        return Message(reply_of(reply), reply_to=message)


def _called(
    client: NumPyClient | Client,
    kind: str,
    message: Message,
    context: Context,
    parcel: Parcel,
    memory: Memory,
) -> Message:
    """Call a user's own client, or one of ours whose `fit` or `evaluate` is, as Flower does.

    Raises RuntimeError if it says that it failed, and ProtocolError for other arrays than the message's.
    """
    given = arrays_in(message.content)[keys.ARRAYS]
    beside = {name: pack(r) for name, r in parcel.records.items() if name != keys.ARRAYS}
    config = {**parcel.config, **beside, keys.NAMES_KEY: json.dumps(list(given))}
    if ours := hasattr(client, "respond"):
        config[keys.MEMORY] = memory
    if isinstance(client, NumPyClient):
        # ours would also refuse a foreign strategy, which node.py does here
        client = NumPyClient.to_client(client) if ours else client.to_client()
    parameters = Parameters([array.data for array in given.values()], "numpy.ndarray")
    fits = kind == "train"
    ins = (FitIns if fits else EvaluateIns)(parameters, config)
    res: Any = getattr(client, METHODS[kind])(ins)
    if res.status.code != Code.OK:
        raise RuntimeError(f"the client's {METHODS[kind]} failed: {res.status.message!r}")
    left = dict(res.metrics)
    closed(message, context, left.pop(keys.MEMORY, None), left.pop(keys.MODEL, None))
    records, numbers, texts = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for key, value in left.items():
        if isinstance(value, bytes | Mapping) and key.endswith(".upload"):
            records[key] = unpack(value) if isinstance(value, bytes) else value
        elif isinstance(value, int | float) and type(value) is not bool and key != keys.ROUND_KEY:
            numbers[key] = value
        else:
            texts[key] = value
    if fits and not parcel.config.get(keys.PROBE_KEY):  # to a probe, no model goes back
        fitted = res.parameters.tensors
        if len(fitted) != len(given):
            raise ProtocolError(f"fit returned {len(fitted)} arrays, expected {list(given)}")
        made = (Array("", (), "numpy.ndarray", data) for data in fitted)
        sent = {n: np.asarray(view_of(n, a), order="C") for n, a in zip(given, made, strict=True)}
        if ours and keys.STEPS_KEY in texts:  # beside a coded update, only buffers that changed
            sent = {n: a for n, a in sent.items() if not np.array_equal(a, given[n].numpy())}
        records[keys.ARRAYS] = sent
    # n_k is the client's second value, even if its metrics hold another
    measured = {"num-examples": res.num_examples, **({} if fits else {"loss": res.loss})}
    return Message(reply_of(Parcel(records, texts, {**numbers, **measured})), reply_to=message)


class RegClientApp(ClientApp):
    """A ClientApp for your own ``@app.train()`` functions around :class:`flwr_regs.ClientRound`.

    For every message it also does the work that needs no model: see :func:`node_mod`.

    Parameters
    ----------
    mods : sequence of Flower mods
    label_counts : callable, optional
        ``label_counts(context)`` returns the number of examples of each class in this client's data, for a
        strategy with class-covering cohorts. That is information about the data: off by default.
    """

    def __init__(self, mods: Sequence[Mod] = (), label_counts: CountsFn | None = None) -> None:
        super().__init__(mods=guarded(mods))
        if label_counts is None:
            return
        if not callable(label_counts):
            raise TypeError(f"label_counts must be a function of a context, not {label_counts!r}")

        @self.query(keys.LABELS.partition(".")[2])
        def share(message: Message, context: Context) -> Message:
            counts = json.dumps([int(n) for n in label_counts(context)])
            return told(message, {keys.LABELS_KEY: counts})

    def train(self, action: str = "default", *, mods: list[Mod] | None = None) -> Register:
        """Register a train function, as Flower does, with guards around Flower's privacy mods."""
        return super().train(action, mods=[*guarded(mods or ()), _with_all_records])

    def evaluate(self, action: str = "default", *, mods: list[Mod] | None = None) -> Register:
        """Register an evaluate function, as Flower does."""
        return super().evaluate(action, mods=[*(mods or ()), _with_all_records])

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply to a message."""
        return node_mod(message, context, self._inside)

    def _inside(self, message: Message, context: Context) -> Any:
        message_type = message.metadata.message_type
        if message_type == keys.PROBE:  # a train message that asks for no training
            message.metadata.message_type = "train"
        try:
            reply: Any = super().__call__(message, context)
        except ValueError as error:
            if str(error).startswith("No evaluate function"):
                remedy = "give the app @app.evaluate(), or the strategy fraction_evaluate=0"
                raise ValueError(f"{error}: {remedy}") from error
            raise
        finally:
            message.metadata.message_type = message_type
        if isinstance(reply, Message):
            reply.metadata.message_type = message_type
        return reply


def _with_all_records(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Give a user's function what came beside the model, too; keep what its reply leaves to the node."""
    content, memory = opened(message, context)
    message.content = RecordDict({**content, keys.MEMORY: ConfigRecord({**memory})})
    reply = call_next(message, context)
    if isinstance(reply, Message) and not reply.has_error():
        held = reply.content.pop(keys.MEMORY, None)
        closed(message, context, held, reply.content.pop(keys.MODEL, None))  # type: ignore[arg-type]
    return reply
