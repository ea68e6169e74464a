"""A method in your own training loop (plain PyTorch, AMP, Lightning) inside a Message-API app."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Message
from torch import nn

from flwr_regs.chain import check_classes, name_of
from flwr_regs.client.loading import Pins, note_left
from flwr_regs.client.local_training import LocalTraining
from flwr_regs.client.member import Identity, begin, end, evaluated, measures, probe
from flwr_regs.client.memory import Memory, Root, written
from flwr_regs.client.personal import own_model
from flwr_regs.client.train.batches import CPU, Batches, seeded
from flwr_regs.client.train.task import uncompiled
from flwr_regs.flower.client import RegClient
from flwr_regs.term import SWITCH, Term
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ForeignStrategy, ProtocolError
from flwr_regs.wire.config import check_arguments, with_plain_numbers
from flwr_regs.wire.parcel import Parcel
from flwr_regs.wire.records import parcel_of, reply_of, to_record

Method = type[RegClient] | Sequence[type[Term]]
"""A named client such as ``FedFORClient``, or the term classes of a composition."""
SETTINGS = {
    *("loss_fn", "target_key", "output_fn", "device", "classifier", "train_mode"),
    *("max_steps", "max_seconds"),
}
"""The settings of a round that :class:`.LocalTraining` takes."""


class ClientRound(LocalTraining):
    """One round of a method on a client, for the ``@app.train()`` function of a RegClientApp.

    ::

        app = RegClientApp()

        @app.train()
        def train(message, context):
            model = Net()
            loop = ClientRound(message, FedFORClient, model, loader)  # loads the global model
            optimizer = loop.optimizer(torch.optim.SGD)
            for inputs, targets in loop.batches():
                optimizer.zero_grad()
                output = model(inputs)
                loop.loss(cross_entropy(output, targets), inputs, targets, output).backward()
                loop.correct()  # after unscaling (AMP), before clipping
                optimizer.step()
            return loop.reply()

    A loop with other batches takes ``num_steps`` optimiser steps. 0 means: do not train, only call `reply`
    (the first exchange of a method with two).

    Parameters
    ----------
    message : Message
        The train message, inside a :class:`flwr_regs.RegClientApp`.
    method : RegClient class or sequence of Term classes
        ``FedFORClient``, or the terms of a composition in the strategy's order.
    model : nn.Module
        The global model is loaded into it by name; it is trained in place.
    train_data
        As for :class:`.LocalTraining`; ``n_k`` counts the examples of the data.
    private, save_private, keep_optimizer : str or sequence of str, str or path, bool
        What never leaves this client, the folder where it saves what it keeps, and whether its optimiser,
        which must come from ``loop.optimizer(...)``, keeps its state: see :class:`flwr_regs.RegClient`.
    **settings
        `loss_fn`, `target_key`, `output_fn`, `device`, `classifier`, `train_mode`, `max_steps` and
        `max_seconds` of :class:`.LocalTraining`.

    Raises
    ------
    ProtocolError
        The strategy is for another method or protocol version, does not withhold what this client keeps to
        itself, or its arrays do not fit the model.
    ValueError
        The config lacks a key, holds an unknown one, or there is no training data.
    TypeError
        A setting that does not exist; a `method` that is none.
    """

    def __init__(
        self,
        message: Message,
        method: Method,
        model: nn.Module,
        train_data: Batches,
        *,
        private: Pins = (),
        save_private: Root = None,
        keep_optimizer: bool = False,
        **settings: Any,
    ) -> None:
        own = {"private", "save_private", "keep_optimizer"}
        check_arguments(type(self).__name__, settings, SETTINGS, own)
        SWITCH.check(type(self).__name__, "keep_optimizer", keep_optimizer)
        name, terms, who = _described(method)
        self._message = message
        if (kind := message.metadata.message_type).split(".")[0] != "train":
            raise ProtocolError(f"ClientRound trains; for '{kind}' messages, use load_model")
        identity = Identity(name, terms, who, private, save_private, keep_optimizer)
        self._member = member = begin(*_content(message), uncompiled(model), identity)
        self._if_it_fails = weakref.finalize(self, note_left, uncompiled(model))
        if member.probing:
            settings["max_steps"] = 0
        with seeded(member.config[keys.SEED_KEY], CPU):  # labels may be counted in a drawn order
            super().__init__(model, member.term, train_data, **settings, **member.duration)

    @property
    def config(self) -> dict[str, Any]:
        """The round's config, such as ``config["user.x"]`` of your own; without what the terms packed."""
        return dict(self._ctx.config)

    def seeded(self) -> contextlib.AbstractContextManager[None]:
        """Seed torch for this client and round within a ``with`` block, as the package's clients do.

        Put the loop and `reply` inside: `reply` also draws if a method reads part of the shuffled data.
        Clients in other threads wait until the block is left.
        """
        return seeded(self._member.config[keys.SEED_KEY], self.device)

    def reply(self, metrics: Mapping[str, Any] | None = None, steps: int | None = None) -> Message:
        """Return the reply to the strategy.

        Parameters
        ----------
        metrics : mapping, optional
            Your own numbers, also 0-d arrays and tensors. The strategy averages those that more than half
            of the clients report; a client that lacks one of them has no share in any mean. What the reply
            says itself, such as ``num-examples`` and ``train-loss``, stays.
        steps : int, optional
            The optimiser's steps, if it did not take one for each `correct`.

        Raises TypeError for a metric that is no number, and ValueError for wrong `steps`.
        """
        if not isinstance(metrics, Mapping | None):
            raise TypeError(f"reply: the metrics must be a mapping, not {metrics!r:.80}")
        own = with_plain_numbers(metrics or {})
        for name, value in own.items():
            if type(value) is bool or not isinstance(value, int | float | list):
                raise TypeError(f"reply: the metric '{name}' must be a number, not {value!r:.80}")
        result, member = self.finish(steps), self._member
        if member.probing:  # finish has put the model back to w_t
            reply, held = probe(member, self._measures)
        else:
            reply, held = end(member, result, self._measures)
        note_left(self._measures.model)
        self._if_it_fails.detach()
        content = reply_of(replace(reply, metrics={**own, **(reply.metrics or {})}))
        content[keys.MEMORY] = ConfigRecord({**written(held)})
        if member.rebuilt is not None:
            content[keys.MODEL] = to_record(member.rebuilt)
        return Message(content, reply_to=self._message)


def load_model(
    message: Message,
    method: Method,
    model: nn.Module,
    *,
    personal: bool = False,
    train_data: Batches = (),
    **settings: Any,
) -> None:
    """Load an evaluate message's global model, and this client's private entries, into `model`.

    Parameters
    ----------
    message : Message
        The evaluate message, inside a :class:`flwr_regs.RegClientApp`.
    method, model
        As for :class:`ClientRound`.
    personal : bool
        Load this client's own model instead, of a method that has one, or that the evaluate config
        personalises; with `save_private` it is saved, too.
    train_data, **settings
        As for :class:`flwr_regs.RegClient`: `private` and `save_private`; for own models that are trained
        further here, the data, `loss_fn`, `target_key`, `output_fn`, `device`, `classifier`, `optimizer`.

    Raises
    ------
    ProtocolError
        Arrays do not fit the model, or the strategy does not withhold what this client keeps to itself;
        `personal` of another method than the strategy's; the message is for a round.
    ValueError
        The config holds an unknown key; `personal` of a method without models of the clients' own.
    """
    if (kind := message.metadata.message_type).split(".")[0] == "train":
        raise ProtocolError(f"load_model evaluates; for '{kind}' messages, use ClientRound")
    name, terms, who = _described(method)
    client = RegClient(model, train_data, terms=terms, **settings)
    plain_model, (parcel, held) = uncompiled(model), _content(message)
    identity = replace(client.identity, method=name, who=who)
    term, slots, _ = evaluated(parcel, held, plain_model, identity)
    if not personal:
        return
    how, place = (client.optimizer, client.save_private), next(plain_model.parameters()).device
    made = own_model(measures(client), term, parcel.config, slots, *how)
    if made is not None:
        plain_model.to(place)  # the user's data are there
        plain_model.load_state_dict(made.state_dict())
        note_left(plain_model)
    elif not term.private(list(plain_model.state_dict())):
        if (runs := parcel.config.get(keys.METHOD_KEY)) != name:
            raise ProtocolError(f"personal=True of {name}, but the strategy runs '{runs}'")
        raise ValueError(f"personal=True, but {name} gives the clients no models of their own")


def _described(method: Method) -> tuple[str, Sequence[type[Term]], str]:
    """Return (method name, terms, the name for errors)."""
    if isinstance(method, type) and issubclass(method, RegClient) and method.method:
        return method.method, method.terms, f"a loop of {method.__name__}"
    terms = check_classes(method, "a loop without a named client, such as FedFORClient,")
    return name_of(terms), terms, "a loop of terms"


def _content(message: Message) -> tuple[Parcel, Memory]:
    """Return (a message's plain values, what the node remembers)."""
    content = message.content
    if keys.ARRAYS not in content or keys.CONFIG not in content:
        expected = f"'{keys.ARRAYS}' and '{keys.CONFIG}' of a strategy of flwr_regs"
        raise ForeignStrategy(f"the message holds {sorted(content)}, expected {expected}")
    if keys.MEMORY not in content:
        raise ProtocolError("the message comes through no RegClientApp: build the app with it")
    return parcel_of(content), dict(content.config_records[keys.MEMORY])  # type: ignore[arg-type]
