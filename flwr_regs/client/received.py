"""A client's half of the wire: turns a round's config and arrays into terms, slots and a loaded model.

The NumPyClient (flower/client.py) and a user's own training loop (flower/client_round.py) share it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from flwr_regs.chain import Chain, chain
from flwr_regs.client.batches import Batches, batch_size, count_batches, count_examples, to_device
from flwr_regs.client.features import FeatureTap
from flwr_regs.client.training import LocalResult
from flwr_regs.term import ClientContext, Slot, Term
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ProtocolError, check_arrays, in_code_order, mask, pack, unpack
from flwr_regs.wire.codec import decode, encode
from flwr_regs.wire.config import check_evaluate_config, check_train_config

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

    Attributes
    ----------
    term : Chain
        The method with this round's hyper-parameters.
    broadcast, client : Slot
        The terms' slots.

    Raises
    ------
    ProtocolError
        The strategy is for another method or protocol version, or arrays do not fit the model.
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
    ) -> None:
        self._model, self._method, self._arrays, self._config = model, method, arrays, config
        self.term = _method(method, terms, f"this client is {who} ({method})", config)
        self.private = load(model, self.term, arrays, config)
        self.broadcast = _slots(terms, config, "broadcast")
        if keys.STEP_KEY in config:
            mine = {n for n, p in model.named_parameters() if p.requires_grad}
            step = unpack(config[keys.STEP_KEY])
            steps = {n: torch.from_numpy(a) for n, a in step.items() if n in mine}
            recovered = self.term.recover(steps, config[keys.PREVIOUS_LR_KEY]) or {}
            self.broadcast = {**recovered, **self.broadcast}
        self.client = _slots(terms, config, "client")
        if any(self.term.ternary):
            self._take_back()

    @property
    def duration(self) -> dict[str, Any]:
        """The round's parameters for :class:`flwr_regs.client.training.LocalTraining`."""
        return {
            "lr": self._config["lr"],
            "epochs": self._config.get("local-epochs"),
            "steps": self._config.get("local-steps"),
            "broadcast": self.broadcast,
            "client": self.client,
            "client_id": self._config.get(keys.CLIENT_KEY, -1),
        }

    def reply(self, result: LocalResult) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return (arrays, metrics) to be sent. Metrics are numbers, texts, and slots as packed bytes.

        A ternary update travels as a code in the metrics; then the arrays are only buffers that changed.
        """
        names = list(self._arrays)
        trainable = {n for n, p in self._model.named_parameters() if p.requires_grad}
        tied = {n: f for n, f in _tied(self._model, self.private).items() if f in trainable}
        buffers = [n for n in names if n not in trainable]
        metrics: dict[str, Any] = {
            keys.METHOD_KEY: self._method,
            keys.BUFFERS_KEY: mask(buffers, names),
            "train-loss": result.loss,
            "local-steps": result.num_steps,
            "planned-steps": result.planned_steps,
            "examples-processed": result.examples_processed,
        }
        metrics |= _packed(result.upload, "upload") | _packed(result.client, "client")
        if tied:
            metrics[keys.TIED_KEY] = json.dumps(tied)
        if self.private:
            private = {n: to_numpy(result.state[n]) for n in self.private}
            metrics[keys.PRIVATE_KEY] = pack(private)
        given = self._arrays
        state = {n: to_numpy(result.state[n]).astype(a.dtype, copy=False) for n, a in given.items()}
        if not self.term.ternary[0]:
            return state, metrics
        delta = {n: d.numpy() for n, d in result.delta.items()}
        coded = encode(in_code_order(delta, delta))
        metrics[keys.UPDATE_KEY] = coded
        if result.num_steps:
            pending = {"update": np.frombuffer(coded, np.uint8)}
            pending["round"] = np.asarray(self._config[keys.ROUND_KEY])
            metrics[keys.PENDING_KEY] = pack(pending)
        own = [n for n in buffers if n not in tied]
        return {n: state[n] for n in own if not np.array_equal(state[n], given[n])}, metrics

    def probe(
        self, data: Batches, device: torch.device, classifier: str | None
    ) -> tuple[int, dict[str, Any]]:
        """Return the reply to the first exchange: (``n_k``, the terms' probes at ``w_t``)."""
        count_batches(data)  # raises if there is no data
        self._model.to(device)
        params = {n: p.detach() for n, p in self._model.named_parameters() if p.requires_grad}
        tap = FeatureTap(self._model, classifier)
        with torch.random.fork_rng(devices=[]):
            _, targets = next(iter(data))
        upload, kept = self.term.probe(
            ClientContext(
                start=params,
                lr=self._config["lr"],
                num_steps=0,
                client=to_device(self.client, device),
                feature_mean=partial(tap.mean, data, device),
                client_id=self._config.get(keys.CLIENT_KEY, -1),
                batch_size=batch_size(targets),
            )
        )
        tap.close()
        metrics: dict[str, Any] = {keys.METHOD_KEY: self._method}
        metrics |= _packed(to_device(upload, "cpu"), "upload")
        metrics |= _packed(to_device(kept, "cpu"), "client")
        return count_examples(data), metrics

    def _take_back(self) -> None:
        """Put the last update back into the residual if the server did not use it."""
        config = self._config
        if keys.PENDING_KEY not in config or not self.term.ternary[0]:
            return
        pending = unpack(config[keys.PENDING_KEY])
        if int(pending["round"]) == config.get(keys.USED_KEY):
            return
        (name,) = (t.name for t in self.term.terms if t.ternary[0])
        residual = self.client[name]
        like = {n: r.numpy() for n, r in residual.items()}
        update = decode(pending["update"].tobytes(), in_code_order(like, like))
        self.client[name] = {n: r + torch.from_numpy(update[n]) for n, r in residual.items()}


def load(
    model: nn.Module, term: Chain, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> list[str]:
    """Load the global model by name, and this client's private entries; return the private names.

    Raises ProtocolError naming an array that does not fit.
    """
    state = model.state_dict()
    chosen = term.private(list(state))
    private = [n for n in state if n in chosen]
    shared = {n: v for n, v in state.items() if n not in chosen}
    tensors = {n: torch.from_numpy(np.asarray(a)) for n, a in arrays.items()}
    given = _as_held(tensors, shared, config.get(keys.HALF_KEY))
    check_arrays(given, shared, "the global model")
    for name, first in _tied(model, private).items():
        if not torch.equal(given[name], given[first]):
            raise ProtocolError(
                f"the global model: '{name}' and '{first}' are one parameter here, but differ"
            )
    mine = {n: state[n] for n in private}
    if keys.PRIVATE_KEY in config:
        kept = unpack(config[keys.PRIVATE_KEY])
        mine = _as_held({n: torch.from_numpy(a) for n, a in kept.items()}, mine, "bfloat16")
        check_arrays(mine, {n: state[n] for n in private}, "this client's private entries")
    model.load_state_dict({**given, **mine})
    return private


def evaluated_term(method: str, terms: Terms, config: Mapping[str, Any]) -> Chain:
    """Return the method of an evaluate config; a chain without terms if it is not this client's method.

    Raises ValueError naming an unknown or wrong key.
    """
    own = {k: v for k, v in config.items() if not k.startswith("regs.")}
    ours = config.get(keys.METHOD_KEY) == method
    term = chain([t.from_config(config) for t in terms] if ours else [])
    check_evaluate_config(own, also=term.config())
    return term


@contextlib.contextmanager
def seeded(seed: Any, device: torch.device) -> Iterator[None]:
    """Seed torch for one client and round; leave the process's own random state as it was.

    All that draws from torch, such as shuffling and dropout, then depends on (seed, round, partition)
    alone. Data that draws from numpy or `random` must seed these itself.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _method(method: str, terms: Terms, me: str, config: Mapping[str, Any]) -> Chain:
    """Check that the config is for this client's method; return the method with its parameters."""
    if keys.METHOD_KEY not in config:
        raise ProtocolError(
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
    term = chain([t.from_config(config) for t in terms])
    slots = [f"{t.name}.{slot}" for t in term.terms for slot in ("broadcast", "client")]
    own = {k: v for k, v in config.items() if not k.startswith("regs.")}
    check_train_config(own, also=[*term.config(), *slots])
    return term


def _slots(terms: Terms, config: Mapping[str, Any], slot: str) -> Slot:
    return {
        t.name: {k: torch.from_numpy(a) for k, a in unpack(config[f"{t.name}.{slot}"]).items()}
        for t in terms
        if f"{t.name}.{slot}" in config
    }


def _packed(slots: Slot, slot: str) -> dict[str, bytes]:
    """Return the terms' slots as they travel: ``"<term>.<slot>" -> bytes``, without empty ones."""
    return {
        f"{name}.{slot}": pack({k: to_numpy(a) for k, a in arrays.items()})
        for name, arrays in slots.items()
        if arrays
    }


def _tied(model: nn.Module, private: Collection[str]) -> dict[str, str]:
    """Return the tied parameters of a model that are shared, other name -> first name.

    Raises ValueError if one name of a parameter is private and another is not.
    """
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    pairs = {n: first.setdefault(id(p), n) for n, p in named}
    if split := [(n, f) for n, f in pairs.items() if (n in private) != (f in private)]:
        raise ValueError(
            f"the tied weights {split[0]} are one parameter, but only one of the two names is "
            "private; name both, or neither"
        )
    return {n: f for n, f in pairs.items() if n != f and n not in private}


def to_numpy(value: Any) -> np.ndarray:
    """Return a tensor as an array; bfloat16, which numpy lacks, becomes float32 without loss."""
    tensor = torch.as_tensor(value).detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _as_held(
    arrays: dict[str, torch.Tensor], held: Mapping[str, torch.Tensor], half: str | None
) -> dict[str, torch.Tensor]:
    """Return float32 arrays in the model's half precision if they travelled in it; others unchanged.

    No value changes. Raises ProtocolError for a bfloat16 model if the arrays did not travel in bfloat16.
    """
    if half != "bfloat16" and (found := [n for n, v in held.items() if v.dtype == torch.bfloat16]):
        raise ProtocolError(
            f"this client's model holds bfloat16 in {found}, which travels only if the strategy has "
            f"wire_dtype='bfloat16', not {half!r} (and then initial_arrays in float32)"
        )
    own = getattr(torch, half) if half else None
    return {
        n: a.to(own) if a.dtype == torch.float32 and n in held and held[n].dtype == own else a
        for n, a in arrays.items()
    }
