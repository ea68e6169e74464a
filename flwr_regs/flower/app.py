"""`client_app`: a Flower ClientApp around a NumPyClient, for Message-API strategies.

Flower's ``ClientApp(client_fn)`` understands only the older message layout, so two mods run around it:
node.py does the work that needs no model, and inside it translation.py translates messages. Nothing
heavy is imported here: on a SuperNode every message starts a new process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp

from flwr_regs.flower.compat import ClientAppCallable, Mod
from flwr_regs.flower.mods import guarded
from flwr_regs.flower.node import closed, node_mod, opened
from flwr_regs.flower.translation import numpyclient_mod
from flwr_regs.wire import keys

ClientFn = Callable[[Context], NumPyClient | Client]


def client_app(client_fn: ClientFn, mods: Sequence[Mod] = ()) -> ClientApp:
    """Return a ClientApp that runs `client_fn`'s client under a Message-API strategy.

    Parameters
    ----------
    client_fn : callable
        ``client_fn(context) -> NumPyClient`` (or Client), called for each train or evaluate message;
        ``context.node_config["partition-id"]`` names the data to load. Import heavy packages inside it.
    mods : sequence of Flower mods
        They see Message-API records. Flower's privacy mods (``flwr.clientapp.mod``) see only train
        messages, and refuse methods that they cannot protect.

    Raises
    ------
    TypeError
        `client_fn` is not callable, or does not return a client; a privacy mod is for the older message
        layout.
    """
    if not callable(client_fn):
        raise TypeError(
            f"client_app needs a function context -> NumPyClient, not {type(client_fn).__name__}"
        )

    return NumPyClientApp(client_fn, mods)


class NumPyClientApp(ClientApp):
    """The app of :func:`client_app`, which says what it was made of; it can be pickled if that can."""

    def __init__(self, client_fn: ClientFn, mods: Sequence[Mod]) -> None:
        def made(context: Context) -> NumPyClient | Client:
            client = client_fn(context)
            if not isinstance(client, NumPyClient | Client):
                raise TypeError(
                    f"client_fn must return a NumPyClient or Client, not {type(client).__name__}"
                )
            return client

        def older(context: Context) -> Client:
            client = made(context)
            return client.to_client() if isinstance(client, NumPyClient) else client

        self.client_fn, self.own_mods = client_fn, tuple(mods)
        translated = partial(numpyclient_mod, made)
        super().__init__(older, mods=[node_mod, *guarded(mods), translated])

    def __reduce__(self) -> tuple[Any, ...]:
        return NumPyClientApp, (self.client_fn, self.own_mods)


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

    def __init__(
        self,
        mods: Sequence[Mod] = (),
        label_counts: Callable[[Context], Sequence[int]] | None = None,
    ) -> None:
        super().__init__(mods=guarded(mods))
        if label_counts is None:
            return

        @self.query(keys.LABELS.partition(".")[2])
        def share(message: Message, context: Context) -> Message:
            counts = json.dumps([int(n) for n in label_counts(context)])
            entries = ConfigRecord({keys.LABELS_KEY: counts})
            return Message(RecordDict({keys.CONFIG: entries}), reply_to=message)

    def train(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> Callable[[ClientAppCallable], ClientAppCallable]:
        """Register a train function, as Flower does, with guards around Flower's privacy mods."""
        return _registering(super().train(action, mods=guarded(mods or ())))

    def evaluate(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> Callable[[ClientAppCallable], ClientAppCallable]:
        """Register an evaluate function, as Flower does."""
        return _registering(super().evaluate(action, mods=mods))

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply to a message."""
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


def _registering(
    register: Callable[[ClientAppCallable], ClientAppCallable],
) -> Callable[[ClientAppCallable], ClientAppCallable]:
    """Return a decorator that registers a function behind the mods, where it gets all records."""

    def decorator(function: ClientAppCallable) -> ClientAppCallable:
        register(partial(_inside_mods, function))
        return function

    return decorator


def _inside_mods(function: ClientAppCallable, message: Message, context: Context) -> Message:
    """Call a user's function with what came beside the model; keep what its reply leaves to the node."""
    beside = opened(message, context)
    for name, record in {**beside, keys.MEMORY: ConfigRecord(beside[keys.MEMORY])}.items():
        message.content[name] = record
    reply = function(message, context)
    if isinstance(reply, Message) and not reply.has_error():
        left = {n: reply.content.pop(n) for n in (keys.MEMORY, keys.MODEL) if n in reply.content}
        closed(message, context, left)
    return reply
