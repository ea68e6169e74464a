"""A client in a round: `begin` makes it of a message, `end` makes its reply. Plain torch and numpy.

`train` is the two around the package's loop, `evaluate` the answer to an evaluation. A user's own training
loop (flower/client_round.py) calls the pair; in between it reads the :class:`Member`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

import flwr_regs.client.train.batches as batches
from flwr_regs.abilities import Compresses, Withholds
from flwr_regs.chain import Chain, chain
from flwr_regs.client import memory, personal
from flwr_regs.client.loading import Layout, Pins, check_custody, load, note_left, tied_names
from flwr_regs.client.local_training import LocalResult, local_round
from flwr_regs.client.measure.classifier import find_classifier
from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.memory import Begun, Folder, Memory, Root, to_numpy
from flwr_regs.client.train.optimizer import Factory, KeptOptimizer
from flwr_regs.client.train.task import Task, uncompiled
from flwr_regs.client.train.trainable import every_parameter, private_entries, trained_parameters
from flwr_regs.term import Config, Slot, Term
from flwr_regs.wire import arrays as wired
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ForeignStrategy, NDArrays, ProtocolError, in_code_order
from flwr_regs.wire.config import check_evaluate_config, check_train_config, plain
from flwr_regs.wire.delta import decoded_model
from flwr_regs.wire.parcel import Parcel

Record = Mapping[str, np.ndarray]
Records = Mapping[str, Record]


@dataclass(frozen=True)
class Identity:
    """Who a client is, whatever round it takes part in.

    Attributes
    ----------
    method, terms : str, sequence of Term classes
        Its method.
    who : str
        The name of its class, for errors.
    private : str or sequence of str
        Patterns of the entries that it keeps to itself.
    folder : str or path, optional
        Where it saves what it remembers.
    keeps_optimizer : bool
        Whether its optimiser goes on with its state.
    """

    method: str
    terms: Sequence[type[Term]]
    who: str
    private: Pins = ()
    folder: Root = None
    keeps_optimizer: bool = False

    @property
    def withholds(self) -> bool:
        """Whether entries of its model may stay with it."""
        return any(issubclass(t, Withholds) for t in self.terms)


class Client(Protocol):
    """What a client trains with; the attributes are those of :class:`flwr_regs.RegClient`."""

    model: torch.nn.Module
    task: Task
    train_data: batches.Batches
    eval_data: batches.Batches | None
    optimizer: Factory
    device: str | torch.device
    classifier: str | None
    step_budget: int | None
    time_budget: float | None
    save_private: Root

    @property
    def identity(self) -> Identity:
        """Who it is, whatever round it takes part in."""


@dataclass(eq=False)
class Asked:
    """A client that is asked for a reply: its message with the model in full, and what it remembers."""

    pid: int
    client: Client
    message: Parcel
    memory: Memory


class Answer(NamedTuple):
    """A client's reply, what it remembers from now on, and the global model; None: as in the message."""

    reply: Parcel
    memory: Memory
    model: NDArrays | None = None


@dataclass(frozen=True)
class Member:
    """A client in a round: its message, checked, and what it remembers.

    Attributes
    ----------
    who, term : Identity, Chain
        The client; its method with this round's hyper-parameters.
    config, arrays : mapping, NDArrays
        The round's config and the global model.
    layout : Layout
    broadcast : Slot
        By term name.
    memory, begun, folder : Memory, Begun, Folder
        What the client remembers, and what of it the round begins with; where it saves that, if it does.
    """

    who: Identity
    term: Chain
    config: Config
    arrays: NDArrays
    layout: Layout
    broadcast: Slot
    memory: Memory
    begun: Begun
    folder: Folder | None

    @property
    def probing(self) -> bool:
        """Whether this is a round's first exchange."""
        return bool(self.config.get(keys.PROBE_KEY))

    @property
    def rebuilt(self) -> NDArrays | None:
        """The model, if it came in the method's code: the node keeps it for the next round."""
        return self.arrays if keys.STEPS_KEY in self.config else None

    @property
    def duration(self) -> dict[str, Any]:
        """The round's parameters for :class:`flwr_regs.client.local_training.LocalTraining`."""
        return {
            "lr": self.config["lr"],
            "epochs": self.config.get("local-epochs"),
            "steps": self.config.get("local-steps"),
            "broadcast": self.broadcast,
            "client": self.begun.slots,
            "client_id": self.config.get(keys.CLIENT_KEY, -1),
            "config": plain(self.config),
        }


def train(client: Client, message: Parcel, held: Memory) -> Answer:
    """Return the answer to a train message, or to a first exchange.

    `held` is what the client remembers. Raises what :func:`begin` and the training raise.
    """
    over_data = measures(client)
    member = begin(message, held, over_data.model, client.identity)
    with ExitStack() as at_the_end:
        at_the_end.callback(note_left, over_data.model)
        at_the_end.enter_context(batches.seeded(member.config[keys.SEED_KEY], over_data.device))
        if member.probing:
            reply, held = probe(member, over_data)
        else:
            reply, held = end(member, trained(member, client, over_data), over_data)
    return Answer(reply, held, member.rebuilt)


def trained(member: Member, client: Client, measures: Measures) -> LocalResult:
    """Return the result of a client's training in the package's loop, on the data of `measures`."""
    return local_round(
        client.model,
        member.term,
        measures.data,
        optimizer=client.optimizer,
        device=measures.device,
        classifier=client.classifier,
        max_steps=client.step_budget,
        max_seconds=client.time_budget,
        **vars(client.task),
        **member.duration,
    )


def evaluate(client: Client, message: Parcel, held: Memory) -> Answer:
    """Return the answer to an evaluate message; the metrics are those of :func:`.personal.score`.

    Where this client has a model of its own, they also hold that one's loss and accuracy, as
    ``"personal-loss"`` and ``"personal-accuracy"``.

    Raises ValueError for a client without `eval_data`.
    """
    if client.eval_data is None:
        remedy = "pass eval_data, or set fraction_evaluate=0"
        raise ValueError(f"{client.identity.who} without test data cannot evaluate: {remedy}")
    over_data = measures(client)
    term, slots, config = evaluated(message, held, over_data.model, client.identity)
    model, data, how = over_data.model, client.eval_data, (client.optimizer, client.save_private)
    with batches.seeded(message.config.get(keys.SEED_KEY, 0), over_data.device):  # a loader draws
        scored = loss, count, metrics = personal.score(model, data, over_data)
        made = personal.own_model(over_data, term, message.config, slots, *how)
        if made is not None or term.private(list(model.state_dict())):
            own_loss, _, own = scored if made is None else personal.score(made, data, over_data)
            metrics |= {f"personal-{k}": v for k, v in {"loss": own_loss, **own}.items()}
    if "personalise" in message.config and message.config.get("personal-part") != "all":
        config[keys.LAYER_KEY] = find_classifier(model, client.classifier)
    return Answer(Parcel({}, config, {"num-examples": count, "loss": loss, **metrics}), held)


def measures(client: Client) -> Measures:
    """Return the functions over a client's data."""
    model, device = uncompiled(client.model), batches.resolve_device(client.device)
    return Measures(model, client.train_data, client.task, device, client.classifier)


def begin(message: Parcel, held: Memory, model: nn.Module, who: Identity) -> Member:
    """Return a client in the round of a message; `model` then holds ``w_t`` and its private entries.

    `held` is what the node remembers.

    Raises
    ------
    ForeignStrategy
        The strategy is not of this package.
    ProtocolError
        The strategy is for another method or protocol version, does not withhold a pinned entry, or its
        arrays do not fit the model; the message lacks its round or seed.
    ValueError
        The config lacks a key, or holds an unknown one.
    """
    config = message.config
    term = method_of(who, config)
    if missing := [key for key in (keys.ROUND_KEY, keys.SEED_KEY) if key not in config]:
        raise ProtocolError(f"the message lacks {missing}, which each round's has")
    check_custody(who.private, model, term)
    arrays, step = model_of(message, model, term)
    folder = None if who.folder is None else Folder(who.folder, config)
    if folder is not None:
        held = folder.completed(held, config)
    begun = memory.begin(held, term, config, bool(private_entries(model, term)))
    layout = load(model, term, arrays, config, begun.private)
    broadcast = broadcast_of(term, message.records, step, layout.trained, config)
    return Member(who, term, config, arrays, layout, broadcast, held, begun, folder)


def model_of(message: Parcel, model: nn.Module, term: Chain) -> tuple[NDArrays, Record | None]:
    """Return (the global model, its last step or None) of a message; coded steps are decoded.

    Raises OutOfSync, and ProtocolError for steps that the method cannot decode.
    """
    arrays, config = {**message.records[keys.ARRAYS]}, message.config
    if keys.STEPS_KEY not in config:
        return arrays, message.records.get(keys.STEP)
    if (coder := term.coder("release")) is None:
        raise ProtocolError("the strategy sends coded steps, but this method has no code for them")
    every = every_parameter(model)
    trained = [n for n in trained_parameters(model, term, every) if n in arrays]
    tied = {n: first for n, first in tied_names(every, ()).items() if first in trained}
    return decoded_model(config, arrays, in_code_order(arrays, trained), tied, coder.decode)


def broadcast_of(
    term: Chain, records: Records, step: Record | None, trained: Collection[str], config: Config
) -> Slot:
    """Return the terms' broadcasts: those that came, and those that follow from the last global step."""
    steps = {n: torch.from_numpy(np.array(a)) for n, a in (step or {}).items() if n in trained}
    slots = {} if step is None else term.recover(steps, config[keys.PREVIOUS_LR_KEY])
    for t in term.terms:
        if record := records.get(f"{t.name}.broadcast"):
            came = {k: torch.from_numpy(np.array(a)) for k, a in record.items()}
            # beside what is recovered, such as what came for this client alone
            slots[t.name] = {**slots.get(t.name, {}), **came}
    return slots


def end(member: Member, result: LocalResult, measures: Measures) -> tuple[Parcel, Memory]:
    """Return (the reply, what the client remembers from now on).

    A coded update travels in the config; then the arrays are only buffers that changed. `measures` are
    those of the model and the data: of them comes this client's own model, where the client saves it.
    """
    given, layout, term = member.arrays, member.layout, member.term
    config = model_entries(member.config, given, layout, result.output_layer)
    metrics = {
        "train-loss": result.loss,
        "local-steps": result.num_steps,
        "planned-steps": result.planned_steps,
        "examples-processed": result.examples_processed,
        "num-examples": result.num_examples,
    }
    new = {n: to_numpy(result.state[n]).astype(a.dtype, copy=False) for n, a in given.items()}
    if term.coder("finish") is not None:
        deltas = {n: to_numpy(d).astype(given[n].dtype) for n, d in result.delta.items()}
        config[keys.STEPS_KEY], new = coded(term, deltas, new, given, layout)
    held, words = member.memory, [keys.LOSS_ROSE] * result.rose
    if result.num_steps:  # a client that took none is as it was
        private = {n: result.state[n] for n in layout.private}
        held = memory.end(held, member.config, result.client, private, member.who.method)
        words += [f"keeps {w}" for w in memory.kinds(member.config, result.client, private)]
    own_model: NDArrays = {}
    if member.folder is not None:
        how = {"lr": member.config["lr"], "config": plain(member.config)}
        own_model = personal.trained_model(term, measures, result, **how)
    config |= _ended(member, held, words, own_model)
    return Parcel({keys.ARRAYS: new, **_uploads(result.upload)}, config, metrics), held


def coded(
    term: Chain, deltas: Record, new: Record, given: NDArrays, layout: Layout
) -> tuple[list[bytes], NDArrays]:
    """Return (an update in its code, the arrays that travel beside it: buffers that have changed).

    `new` are the client's arrays, `given` the global model's.
    """
    coder: Any = term.coder("finish")
    buffers = [n for n in given if n not in layout.trained and n not in layout.tied]
    changed = {n: new[n] for n in buffers if not np.array_equal(new[n], given[n])}
    return [coder.encode(in_code_order(deltas, deltas))], changed


def probe(member: Member, measures: Measures) -> tuple[Parcel, Memory]:
    """Return (the reply to the first exchange, the terms' probes at ``w_t``; what is remembered)."""
    upload, slots = first_exchange(member, measures)
    held = memory.end(member.memory, member.config, slots, None, member.who.method)
    metrics = {"num-examples": batches.count_examples(measures.data)}
    return Parcel(_uploads(upload), _ended(member, held), metrics), held


def _ended(
    member: Member, held: Memory, words: Iterable[str] = (), own_model: NDArrays | None = None
) -> dict[str, Any]:
    """Write what the client remembers from now on; return the entries that each reply has.

    `words` are what it says, beside what it has lost. The client's own model is written last: its reader
    takes what was written last.
    """
    words = [*words]
    if member.folder and held is not member.memory and not member.folder.write(held, member.config):
        words.append(keys.NOT_SAVED)
    if member.folder and own_model and not member.folder.write_personal(own_model):
        words.append(keys.NOT_SAVED)
    entries = reply_entries(member.config, member.begun, words)
    return {keys.METHOD_KEY: member.who.method, **entries}


def model_entries(
    config: Config, arrays: NDArrays, layout: Layout, output_layer: str | None
) -> dict[str, Any]:
    """Return a reply's entries about the model; `config` and `arrays` are those of its message."""
    buffers = frozenset(n for n in arrays if n not in layout.trained)
    entries: dict[str, Any] = {}
    if layout.tied or buffers != wired.untrainable(arrays):
        entries[keys.NOT_TRAINED_KEY] = wired.listed(buffers, layout.tied)
    if layout.frozen_digest and keys.FROZEN_DIGEST_KEY not in config:
        entries[keys.FROZEN_DIGEST_KEY] = layout.frozen_digest  # the server has yet to know
    if output_layer is not None:
        entries[keys.LAYER_KEY] = output_layer
    return entries


def reply_entries(config: Config, begun: Begun, words: Iterable[str] = ()) -> dict[str, Any]:
    """Return the entries of any reply: its message's training and round, what is lost, other `words`."""
    entries = {n: config[n] for n in (keys.START_KEY, keys.ROUND_KEY) if n in config}
    said = [*(f"lost {what}" for what in begun.lost), *words]
    return {**entries, keys.MEMORY_KEY: said} if said else entries


def _uploads(slots: Slot) -> dict[str, NDArrays]:
    return {f"{t}.upload": {k: to_numpy(a) for k, a in s.items()} for t, s in slots.items() if s}


def evaluated(
    message: Parcel, held: Memory, model: nn.Module, who: Identity
) -> tuple[Chain, Slot, dict[str, Any]]:
    """Load the model of an evaluation; return (the method, its slots, the reply's entries about itself).

    The method is a chain without terms if it is not this client's. Raises ProtocolError as `begin` does,
    and ValueError naming an unknown or wrong key.
    """
    config = message.config
    ours = config.get(keys.METHOD_KEY) == who.method
    term = chain(_built(who, config) if ours else [])
    # terms' hyper-parameters are keys with a dot
    check_evaluate_config(_own(config), term.config() if ours else {k for k in config if "." in k})
    check_custody(who.private, model, term)
    if who.folder is not None and keys.START_KEY in config:
        held = Folder(who.folder, config).completed(held, config)
    withholds = bool(term.private(list(model.state_dict())))
    begun = memory.latest(held, config, withholds)
    load(model, term, {**message.records[keys.ARRAYS]}, config, begun.private)
    return term, begun.slots, reply_entries(config, begun)


def first_exchange(member: Member, measures: Measures) -> tuple[Slot, Slot]:
    """Return the terms' (uploads, client slots) of a first exchange, on the CPU.

    The model of `measures` holds ``w_t``.
    """
    term, told = member.term, member.duration
    model, pairs, device = measures.model, measures.data, measures.device
    batches.count_batches(pairs)  # raises if there is no data
    model.to(device)
    private = private_entries(model, term)
    with batches.forked():
        _, targets = next(iter(pairs))
    counts = any("label_counts" in t.needs for t in term.terms)
    ctx = measures.context(
        {n: p.detach() for n, p in trained_parameters(model, term).items() if n not in private},
        num_steps=0,
        client=batches.to_device(told["client"], device),
        label_counts=batches.label_counts(pairs).to(device) if counts else None,
        batch_size=batches.batch_size(targets),
        **{name: told[name] for name in ("lr", "client_id", "config")},
    )
    upload, kept = term.probe(ctx)
    return batches.to_device(upload, "cpu"), batches.to_device(kept, "cpu")


def method_of(who: Identity, config: Config) -> Chain:
    """Check that the config is for this client's method; return the method with its parameters."""
    me = f"this client is {who.who} ({who.method})"
    if keys.METHOD_KEY not in config:
        name = who.method.partition("+")[0]
        raise ForeignStrategy(
            f"{me}, but the strategy named no method; use flwr_regs.{name} or RegStrategy"
        )
    if (named := config[keys.METHOD_KEY]) != who.method:
        raise ProtocolError(
            f"{me}, but the strategy runs '{named}'; both must be of the same method"
        )
    if (spoken := config.get(keys.PROTOCOL_KEY)) != keys.PROTOCOL:
        raise ProtocolError(
            f"{me} and speaks protocol {keys.PROTOCOL}, but the strategy speaks {spoken}; install the same "
            "flwr-regs version on both sides"
        )
    term = chain(_built(who, config))
    check_train_config(_own(config), also=list(term.config()))
    return term


def _own(config: Config) -> dict[str, Any]:
    """Return a config without the protocol's entries."""
    return {k: v for k, v in config.items() if not k.startswith("regs.")}


def _built(who: Identity, config: Config) -> list[Term]:
    """Return the terms with a message's hyper-parameters; the server's own terms have none in it."""
    terms = [t.from_config(config) for t in who.terms if not t.server_only]
    if who.keeps_optimizer:  # a term that compresses stays last
        compresses = bool(terms) and isinstance(terms[-1], Compresses)
        terms.insert(len(terms) - compresses, KeptOptimizer())
    return terms
