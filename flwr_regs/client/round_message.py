"""A client's half of the wire: turns a round's config and arrays into terms, slots and a loaded model.

The NumPyClient (flower/client.py) and a user's own training loop (flower/client_round.py) share it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from flwr_regs.chain import Chain, chain
from flwr_regs.client.loading import load, tied_names
from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.memory import state
from flwr_regs.client.memory.pinned import Pins, check_custody
from flwr_regs.client.memory.saved import Folder, Saved
from flwr_regs.client.memory.state import ClientState, to_numpy
from flwr_regs.client.train.batches import (
    Batches,
    batch_size,
    count_batches,
    count_examples,
    to_device,
)
from flwr_regs.client.train.batches import label_counts as count_labels
from flwr_regs.client.train.client_result import LocalResult
from flwr_regs.client.train.task import Task
from flwr_regs.client.train.trainable import every_parameter, private_entries, trained_parameters
from flwr_regs.term import Slot, Term
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import (
    ForeignStrategy,
    NDArrays,
    ProtocolError,
    in_code_order,
    mask,
    pack,
    unpack,
)
from flwr_regs.wire.config import check_evaluate_config, check_train_config
from flwr_regs.wire.delta import decoded_model
from flwr_regs.wire.errors import described

LOG = logging.getLogger("flwr")
Terms = Sequence[type[Term]]


class Received:
    """A round's message to a client, checked; the model then holds ``w_t``.

    Parameters
    ----------
    model : nn.Module
        Loads the global model by name, and this client's private entries.
    method, terms : str, sequence of Term classes
        This client's method.
    who : str
        The name of this client's class, for errors.
    arrays : mapping
        The global model, numpy by name.
    config : mapping
        The round's config, with slots packed as bytes.
    pins, folder : str or sequence of str, str or path
        The entries that this client keeps to itself, and where it saves what it keeps, if anywhere.

    Attributes
    ----------
    term : Chain
        The method with this round's hyper-parameters.
    broadcast, client : Slot
        The terms' slots.

    Raises
    ------
    ForeignStrategy
        The strategy is not of this package.
    ProtocolError
        The strategy is for another method or protocol version, does not withhold a pinned entry, or its
        arrays do not fit the model.
    ValueError
        The config lacks a key, or holds an unknown one.
    """

    def __init__(
        self,
        model: nn.Module,
        method: str,
        terms: Terms,
        who: str,
        arrays: Mapping[str, np.ndarray],
        config: Mapping[str, Any],
        pins: Pins = (),
        folder: Folder = None,
    ) -> None:
        self._model, self._method = model, method
        self.term = method_of(method, terms, f"this client is {who} ({method})", config)
        check_custody(pins, model, self.term)
        if (saved := Saved(folder, config) if folder is not None else None) is not None:
            saved.entering()
            config = saved.config
        self._config, self._saved = config, saved
        self._coded = config.get(keys.DOWNLINK_KEY) == "coded"
        self._arrays, step = {**arrays}, None
        if self._coded:
            self._arrays, step = self._decoded()
        elif keys.STEP_KEY in config:
            step = unpack(config[keys.STEP_KEY])
        self._every = every = every_parameter(model)
        self.private, self._frozen_digest = load(model, self.term, self._arrays, config, every)
        self._trainable = set(trained_parameters(model, self.term, every))
        self.broadcast = state.slots(self.term, config, "broadcast")
        if step is not None:
            steps = {n: torch.from_numpy(a) for n, a in step.items() if n in self._trainable}
            recovered = self.term.recover(steps, config[keys.PREVIOUS_LR_KEY])
            for name, slot in recovered.items():  # beside what came for this client alone
                self.broadcast[name] = {**slot, **self.broadcast.get(name, {})}
        update = {n: a for n, a in self._arrays.items() if n in self._trainable}
        self._lost = saved is not None and saved.lost
        try:
            kept = ClientState.read(self.term, config)
            self._kept, lost = kept.entering(self.term, config, update)
            self._lost |= lost
        except Exception as error:  # damaged, or a term cannot take it back
            LOG.warning("this client's state is lost: %s", described(error))
            kept, self._kept = ClientState(), ClientState(round=config[keys.ROUND_KEY])
        self._lost |= keys.USED_KEY in config and kept == ClientState()
        self.client = {**self._kept.settled, **self._kept.pending}

    def _decoded(self) -> tuple[NDArrays, NDArrays]:
        """Return (the global model, the last step) from steps in the method's code; raise OutOfSync."""
        coder = self.term.coder("release")
        if coder is None:
            raise ProtocolError(
                "the strategy sends coded steps, but this method has no code for them"
            )
        return decoded_model(self._config, self._arrays, coder.decode)

    @property
    def duration(self) -> dict[str, Any]:
        """The round's parameters for :class:`flwr_regs.client.local_training.LocalTraining`."""
        return {
            "lr": self._config["lr"],
            "epochs": self._config.get("local-epochs"),
            "steps": self._config.get("local-steps"),
            "broadcast": self.broadcast,
            "client": self.client,
            "client_id": self._config.get(keys.CLIENT_KEY, -1),
            "config": plain(self._config),
        }

    def reply(
        self, result: LocalResult, own_model: Callable[..., NDArrays] = lambda **_: {}
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return (arrays, metrics) to be sent. Metrics are numbers, texts, and slots as packed bytes.

        A coded update travels in the metrics; then the arrays are only buffers that changed. `own_model`
        makes this client's own model of the round's `lr` and `config`, where the client saves it.
        """
        names = list(self._arrays)
        tied = tied_names(self._model, self.private, self._every)
        tied = {n: f for n, f in tied.items() if f in self._trainable}
        buffers = [n for n in names if n not in self._trainable]
        metrics: dict[str, Any] = {
            keys.METHOD_KEY: self._method,
            keys.BUFFERS_KEY: mask(buffers, names),
            "train-loss": result.loss,
            "local-steps": result.num_steps,
            "planned-steps": result.planned_steps,
            "examples-processed": result.examples_processed,
        }
        metrics |= state.packed(result.upload, "upload")
        if self._frozen_digest and keys.FROZEN_DIGEST_KEY not in self._config:
            metrics[keys.FROZEN_DIGEST_KEY] = self._frozen_digest  # the server has yet to know
        if result.output_layer is not None:
            metrics[keys.LAYER_KEY] = result.output_layer
        if tied:
            metrics[keys.TIED_KEY] = json.dumps(tied)
        given = self._arrays
        new = {n: to_numpy(result.state[n]).astype(a.dtype, copy=False) for n, a in given.items()}
        private = {n: to_numpy(result.state[n]) for n in self.private}
        sent = {n: to_numpy(d).astype(given[n].dtype, copy=False) for n, d in result.delta.items()}
        coder, code = self.term.coder("finish"), None
        if coder is not None:
            code = metrics[keys.UPDATE_KEY] = coder.encode(in_code_order(sent, sent))
            own = [n for n in buffers if n not in tied]
            new = {n: new[n] for n in own if not np.array_equal(new[n], given[n])}
        if result.num_steps:
            metrics |= state.entries(self.term, self._kept, result.client, sent=sent, code=code)
        else:
            metrics |= state.untrained(self.term, self._kept)
        kept = self._for_node(metrics, private)
        saved = self._saved
        if saved and (mine := own_model(lr=self._config["lr"], config=self._config)):
            kept |= saved.keep_personal(mine)
        return new, kept

    def probe(
        self, data: Batches, device: torch.device, classifier: str | None, task: Task
    ) -> tuple[int, dict[str, Any]]:
        """Return the reply to the first exchange: (``n_k``, the terms' probes at ``w_t``)."""
        upload, kept = first_exchange(
            self._model,
            self.term,
            data,
            task,
            lr=self._config["lr"],
            device=device,
            classifier=classifier,
            client=self.client,
            client_id=self._config.get(keys.CLIENT_KEY, -1),
            config=plain(self._config),
        )
        metrics: dict[str, Any] = {keys.METHOD_KEY: self._method}
        metrics |= state.packed(upload, "upload")
        metrics |= state.entries(self.term, self._kept, kept)
        own = unpack(self._config[keys.PRIVATE_KEY]) if keys.PRIVATE_KEY in self._config else {}
        return count_examples(task.pairs(data)), self._for_node(metrics, own)

    def _for_node(
        self, metrics: Mapping[str, Any], private: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        """Return a reply's `metrics`, with what the node keeps beside the slots; write all that is kept.

        That is private entries, and a model that came coded.
        """
        kept: dict[str, Any] = {keys.PRIVATE_KEY: pack(private)} if private else {}
        if private and keys.PRIVATE_KEY not in self._config:
            kept[keys.FRESH_KEY] = True  # new or lost: the server knows which
        if self._coded:
            kept[keys.MODEL_KEY] = pack(self._arrays)
        reply = {**metrics, **kept, **({keys.LOST_KEY: True} if self._lost else {})}
        return reply if self._saved is None else reply | self._saved.leaving(reply)


def first_exchange(
    model: nn.Module,
    term: Chain,
    data: Batches,
    task: Task,
    *,
    lr: float,
    device: torch.device,
    classifier: str | None,
    client: Slot,
    client_id: int,
    config: Mapping[str, Any],
) -> tuple[Slot, Slot]:
    """Return the terms' (uploads, client slots) of a first exchange, on the CPU; `model` holds ``w_t``."""
    pairs = task.pairs(data)
    count_batches(pairs)  # raises if there is no data
    model.to(device)
    private = private_entries(model, term)
    trained = trained_parameters(model, term)
    with torch.random.fork_rng(devices=[]):
        _, targets = next(iter(pairs))
    needs = {need for t in term.terms for need in t.needs}
    ctx = Measures(model, pairs, task, device, classifier).context(
        {n: p.detach() for n, p in trained.items() if n not in private},
        lr,
        num_steps=0,
        client=to_device(client, device),
        label_counts=count_labels(pairs).to(device) if "label_counts" in needs else None,
        client_id=client_id,
        batch_size=batch_size(targets),
        config=config,
    )
    upload, kept = term.probe(ctx)
    return to_device(upload, "cpu"), to_device(kept, "cpu")


def evaluated_term(method: str, terms: Terms, config: Mapping[str, Any]) -> Chain:
    """Return the method of an evaluate config; a chain without terms if it is not this client's method.

    Raises ValueError naming an unknown or wrong key.
    """
    own = {k: v for k, v in config.items() if not k.startswith("regs.")}
    ours = config.get(keys.METHOD_KEY) == method
    term = chain(_built(terms, config) if ours else [])
    check_evaluate_config(own, also=[*term.config(), *_slot_keys(term)])
    return term


@contextlib.contextmanager
def seeded(seed: Any, device: torch.device) -> Iterator[None]:
    """Seed torch for one client and round; leave the process's own random state as it was.

    All that draws from torch, such as shuffling and dropout, then depends on (seed, round, partition)
    alone. Data that draws from numpy or `random` must seed these itself. An accelerator is seeded if the
    client is on it, or if this process has used it before.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type != "cpu" or _accelerated():
            torch.manual_seed(seed)
        else:  # the same, without a traceback that torch formats for each kind of accelerator
            torch.default_generator.manual_seed(int(seed))
        yield


def _accelerated() -> bool:
    """Whether this process has an accelerator in use, which may draw from generators of its own."""
    if (found := _accelerator()) is None:
        return False
    started = getattr(torch.get_device_module(found), "is_initialized", None)
    return started is None or bool(started())


@functools.cache
def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


def method_of(method: str, terms: Terms, me: str, config: Mapping[str, Any]) -> Chain:
    """Check that the config is for this client's method; return the method with its parameters."""
    if keys.METHOD_KEY not in config:
        raise ForeignStrategy(
            f"{me}, but the strategy named no method; use flwr_regs.{method.partition('+')[0]} or "
            "RegStrategy"
        )
    if config[keys.METHOD_KEY] != method:
        raise ProtocolError(
            f"{me}, but the strategy runs '{config[keys.METHOD_KEY]}'; "
            "the strategy and the client must be of the same method"
        )
    if config.get(keys.PROTOCOL_KEY) != keys.PROTOCOL:
        raise ProtocolError(
            f"{me} and speaks protocol {keys.PROTOCOL}, but the strategy speaks "
            f"{config.get(keys.PROTOCOL_KEY)}; install the same flwr-regs version on both sides"
        )
    term = chain(_built(terms, config))
    own = {k: v for k, v in config.items() if not k.startswith("regs.")}
    check_train_config(own, also=[*term.config(), *_slot_keys(term)])
    return term


def _built(terms: Terms, config: Mapping[str, Any]) -> list[Term]:
    """Return the terms with a message's hyper-parameters; the server's own terms have none in it."""
    return [t.from_config(config) for t in terms if not t.server_only]


def _slot_keys(term: Chain) -> list[str]:
    kinds = ("broadcast", state.SETTLED, state.PENDING, state.ALWAYS)
    return [f"{t.name}.{kind}" for t in term.terms for kind in kinds]


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without packed slots; the user's own bytes stay."""
    return {k: v for k, v in config.items() if not isinstance(v, bytes) or k.startswith("user.")}
