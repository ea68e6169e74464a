"""A stack's clients, and their replies as Flower's messages."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from flwr_regs.abilities import TakesBack, Withholds
from flwr_regs.chain import Chain
from flwr_regs.client.loading import load, tied_names
from flwr_regs.client.memory import state
from flwr_regs.client.memory.state import ClientState, to_numpy
from flwr_regs.client.round_message import plain
from flwr_regs.client.train.batches import (
    Pairs,
    count_batches,
    resolve_device,
)
from flwr_regs.client.train.optimizer import optimizer_of
from flwr_regs.client.train.trainable import trained_parameters
from flwr_regs.cohort.batch_plan import CannotStack
from flwr_regs.cohort.member_view import Member, Shared
from flwr_regs.cohort.stacked_training import Stack, StackedResult
from flwr_regs.flower.client import RegClient
from flwr_regs.flower.grids.stacked_records import Writer, filled, written
from flwr_regs.flower.node import AT_ONCE, NodeState
from flwr_regs.term import Slot
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, in_code_order, mask
from flwr_regs.wire.records import to_array

COPIES = 6
"""Of the parameters: values, update, gradients, two states of an optimiser, and a buffer."""


@dataclass(frozen=True)
class Recipe:
    """What the messages of a round say to all clients of one kind: the method, and how long they train."""

    kind: tuple[Any, ...]
    config: Mapping[str, Any]
    method: str
    term: Chain

    @cached_property
    def needs(self) -> frozenset[str]:
        """What the terms read in every step."""
        return frozenset(need for t in self.term.terms for need in t.needs)

    @cached_property
    def withholds(self) -> bool:
        """Whether clients have private entries."""
        return any(isinstance(t, Withholds) for t in self.term.terms)

    @cached_property
    def takes_back(self) -> bool:
        """Whether clients keep the update that they sent."""
        return any(isinstance(t, TakesBack) for t in self.term.terms)

    @property
    def probes(self) -> bool:
        """Whether this is a round's first exchange, without training."""
        return bool(self.config.get(keys.PROBE_KEY))

    def steps(self, data: Pairs) -> int:
        """Return E; for a first exchange, the batches of one pass.

        Raises CannotStack for data that have to be counted: that may draw random numbers.
        """
        if (steps := self.config.get("local-steps")) and not self.probes:
            return int(steps)
        try:
            len(data)
        except TypeError:
            raise CannotStack("its data have no length") from None
        epochs = 1 if self.probes else self.config.get("local-epochs", 0)
        return int(epochs * count_batches(data))


@dataclass(frozen=True)
class Candidate:
    """A client that can train in a stack, with what it brings; the model travels apart.

    `before` is its state before `client_fn`, and `drawn` that of torch's random generator.
    """

    message: Message
    before: Mapping[str, Any]
    drawn: Tensor
    context: Context
    client: RegClient
    recipe: Recipe
    node: NodeState
    slots: Mapping[str, ArrayRecord]
    kept: ClientState
    lost: bool
    fresh: bool
    member: Member
    examples: int
    seed: int


@dataclass(eq=False)
class Kind:
    """What is known of the clients that could train in one stack, in this round and in later ones.

    Attributes
    ----------
    like : Hashable
        What they share: method, model, loss, optimiser, device.
    refused : str
        Why they train one by one; "" if they do not.
    due : float
        The round from which on their next stack is checked.
    """

    like: Hashable
    refused: str = ""
    due: float = 0


class Group:
    """Clients that train in one stack.

    Parameters
    ----------
    first : Candidate
        Its model becomes the stack's, and is loaded.
    record, arrays : ArrayRecord, NDArrays
        The global model, as it came, and decoded.
    broadcast : Slot
    precision : torch.dtype or None
    kind : Kind
    """

    def __init__(
        self,
        first: Candidate,
        record: ArrayRecord,
        arrays: NDArrays,
        broadcast: Slot,
        precision: torch.dtype | None,
        kind: Kind,
    ) -> None:
        client, term, config = first.client, first.recipe.term, first.recipe.config
        model = client.model
        self.recipe, self.record, self.arrays = first.recipe, record, arrays
        self.candidates: list[Candidate] = []
        self.kind = kind
        self._fixed = self._fixed_of(model)
        private, frozen_digest = load(model, term, arrays, config)
        trained = list(trained_parameters(model, term))
        tied = {n: f for n, f in tied_names(model, private).items() if f in trained}
        names, shared = list(arrays), [n for n in trained if n not in private]
        if not shared:
            raise CannotStack("it trains no parameter that is shared")
        buffers = [n for n in names if n not in shared]
        self.texts: dict[str, Any] = {
            keys.METHOD_KEY: self.recipe.method,
            keys.BUFFERS_KEY: mask(buffers, names),
        }
        if keys.FROZEN_DIGEST_KEY not in config and frozen_digest:
            self.texts[keys.FROZEN_DIGEST_KEY] = frozen_digest
        if tied:
            self.texts[keys.TIED_KEY] = json.dumps(tied)
        self._tied, self.private = tied_names(model, ()), private
        self.own_buffers = {n for n in buffers if n not in self._tied}
        self.first = self._tied | _other_names(model)
        entries = model.state_dict()
        self._one: int = sum(entries[n].nbytes for n in shared) * COPIES
        self._drawn = 0  # bytes of batches
        self.shared = Shared(
            model,
            term,
            client._task,
            resolve_device(client.device),
            {n: v.detach().clone() for n, v in entries.items() if n not in private},
            trained,
            shared,
            config["lr"],
            term.client_optimizer(optimizer_of(config, client.optimizer)),
            broadcast,
            plain(config),
            client.classifier,
            precision,
        )

    def _fixed_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what neither travels nor is private nor trained: it must be the same on all clients."""
        term = self.recipe.term
        entries = model.state_dict()
        private = term.private(list(entries))
        trained = trained_parameters(model, term)
        parameters = {n: p for n, p in model.named_parameters() if n not in trained}
        inner = {n: b for n, b in model.named_buffers() if n not in entries}
        return {
            n: v.detach().clone() for n, v in {**parameters, **inner}.items() if n not in private
        }

    def add(self, candidate: Candidate) -> None:
        """Take a client of the same kind; raise CannotStack if it holds other fixed values."""
        model = candidate.client.model
        if model is not self.shared.model and (self.candidates or self._fixed):
            mine = self._fixed_of(model) if self._fixed else {}
            if odd := [n for n, v in self._fixed.items() if not torch.equal(v, mine[n])]:
                raise CannotStack(f"it holds other values than the others in {odd}")
        self.candidates.append(candidate)
        self._drawn += candidate.member.plan.nbytes

    def is_full(self, memory: int) -> bool:
        """Whether another client would take more than `memory` bytes."""
        return (len(self.candidates) + 1) * self._one + self._drawn > memory

    def run(self, stack: Stack | None = None) -> StackedResult:
        """Train the clients in a stack; default: all of them. No client's state has changed by then.

        What does not travel is then as before; raise CannotStack if the round changes it. A client may keep
        its model for the next round, and with it such a buffer.
        """
        model = self.shared.model
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if stack is None:
            stack = Stack(self.shared, [c.member for c in self.candidates], self.candidates[0].seed)
        try:
            result = stack.probe() if self.recipe.probes else stack.run()
        finally:
            with torch.no_grad():
                for n, v in self._fixed.items():
                    held[n].copy_(v)
        fixed = {n: result.state[n] for n in self._fixed if n in result.state}
        if odd := [n for n, v in fixed.items() if any(one.ne(self._fixed[n]).any() for one in v)]:
            raise CannotStack(f"the round changes {odd}, which the model's state_dict lacks")
        return result

    def replies(self, result: StackedResult) -> list[Message]:
        """Return the clients' replies, in their order; their nodes keep what belongs to them."""
        make = (ProbeReplies if self.recipe.probes else Replies)(self, result)
        made = [make.content(k, c) for k, c in enumerate(self.candidates)]
        for c, (_, kept) in zip(self.candidates, made, strict=True):
            c.node.keep_slots(kept)
            if self.recipe.config.get(keys.KEEP_KEY):
                c.node.keep_model(make.record)
        pairs = zip(self.candidates, made, strict=True)
        return [Message(content, reply_to=c.message) for c, (content, _) in pairs]


class ProbeReplies:
    """The contents of the replies to a first exchange."""

    def __init__(self, group: Group, result: StackedResult) -> None:
        self._term, self._writer = group.recipe.term, Writer()
        self._texts: dict[str, Any] = {keys.METHOD_KEY: group.recipe.method}
        self._upload = self._writer.slots(result.upload, len(group.candidates))
        self._client = self._writer.slots(result.client, len(group.candidates))
        self.record = group.record

    def content(self, k: int, c: Candidate) -> tuple[RecordDict, dict[str, ArrayRecord]]:
        """Return a client's reply, and the records that its node keeps."""
        entries = state.entries(self._term, c.kept, self._client[k], form=self._writer.record)
        if keys.PRIVATE_KEY in c.slots:
            entries[keys.PRIVATE_KEY] = c.slots[keys.PRIVATE_KEY]
        return self._filled(k, c, {}, {"num-examples": c.examples}, dict(self._texts), entries)

    def _filled(
        self, k: int, c: Candidate, records: dict[str, Any], numbers: Mapping[str, Any],
        texts: dict[str, Any], entries: Mapping[str, Any],
    ) -> tuple[RecordDict, dict[str, ArrayRecord]]:  # fmt: skip
        """Return a reply with all that it holds, and what of `entries` the node keeps."""
        if c.lost:
            texts[keys.LOST_KEY] = True
        kept = {n: v for n, v in entries.items() if isinstance(v, ArrayRecord)}
        texts |= {n: v for n, v in entries.items() if n not in kept}
        if c.node.ahead and any(name.endswith(AT_ONCE) for name in c.slots):
            texts[keys.AHEAD_KEY] = True
        uploads = self._upload[k].items()
        found: dict[str, Any] = {f"{t}.upload": self._writer.record(own) for t, own in uploads}
        found |= records
        found[keys.METRICS] = MetricRecord(dict(numbers))
        found[keys.CONFIG] = ConfigRecord(texts)
        return RecordDict(found), kept


class Replies(ProbeReplies):
    """The contents of a stack's replies."""

    def __init__(self, group: Group, result: StackedResult) -> None:
        super().__init__(group, result)
        self._group, self._result = group, result
        given, first, held = group.arrays, group.first, group.shared.start
        self._coder = self._term.coder("finish")
        coded = self._coder is not None
        # by client; as arrays, if only those travel that changed
        self._new: dict[str, Sequence[Any]] = {}
        members = len(group.candidates)
        for n, a in given.items():
            name = first.get(n, n)
            if coded and n not in group.own_buffers:
                continue
            if name in result.state:
                stacked: Any = _numpy(result.state[name], a.dtype)
                self._new[n] = stacked if coded else written(stacked)
            else:
                still = _numpy(held[n].cpu(), a.dtype)
                self._new[n] = [still if coded else to_array(still)] * members
        texts = dict(group.texts)
        if result.output_layer is not None:
            texts[keys.LAYER_KEY] = result.output_layer
        self._texts = texts
        self.record = group.record
        sends = group.recipe.takes_back or coded
        self._sent = {n: _numpy(d, given[n].dtype) for n, d in result.delta.items() if sends}
        own = {n: result.state[first.get(n, n)] for n in group.private}
        private = {keys.PRIVATE_KEY: own}
        self._private = self._writer.slots(private, members)

    def content(self, k: int, c: Candidate) -> tuple[RecordDict, dict[str, ArrayRecord]]:
        """Return a client's reply, and the records that its node keeps."""
        result = self._result
        sent = {n: d[k] for n, d in self._sent.items()}
        texts, code = dict(self._texts), None
        if self._coder is not None:
            code = texts[keys.UPDATE_KEY] = self._coder.encode(in_code_order(sent, sent))
        entries = state.entries(
            self._term, c.kept, self._client[k], sent=sent, code=code, form=self._writer.record
        )
        if (private := self._private[k].get(keys.PRIVATE_KEY)) is not None:
            entries[keys.PRIVATE_KEY] = self._writer.record(private)
            if c.fresh:
                texts[keys.FRESH_KEY] = True
        numbers = {
            "train-loss": result.losses[k],
            "local-steps": len(c.member.plan),
            "planned-steps": c.member.planned_steps,
            "examples-processed": result.examples[k],
            "num-examples": c.examples,
        }
        records = {keys.ARRAYS: filled(self._arrays(k))}
        return self._filled(k, c, records, numbers, texts, entries)

    def _arrays(self, k: int) -> dict[str, Array]:
        """Return a client's model; beside a coded update, only buffers that changed."""
        mine = {n: each[k] for n, each in self._new.items()}
        if self._coder is None:
            return mine
        given = self._group.arrays
        return {n: to_array(a) for n, a in mine.items() if not np.array_equal(a, given[n])}


def _other_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of a model's buffers -> the first, as for a layer that is there twice."""
    first: dict[int, str] = {}
    named = model.named_buffers(remove_duplicate=False)
    pairs = {n: first.setdefault(id(b), n) for n, b in named}
    return {n: f for n, f in pairs.items() if n != f}


def _numpy(tensor: Tensor, dtype: np.dtype[Any]) -> np.ndarray:
    return to_numpy(tensor).astype(dtype, copy=False)
