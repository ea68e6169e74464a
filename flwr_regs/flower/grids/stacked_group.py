"""A stack's clients, and their replies as Flower's messages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor, nn

from flwr_regs.abilities import Withholds
from flwr_regs.chain import Chain
from flwr_regs.client.loading import load, tied_names
from flwr_regs.client.member import Member as ClientMember
from flwr_regs.client.member import end, end_probe, plain
from flwr_regs.client.memory import Begun, Memory
from flwr_regs.client.train.batches import (
    Pairs,
    count_batches,
    resolve_device,
)
from flwr_regs.client.train.client_result import LocalResult
from flwr_regs.client.train.optimizer import optimizer_of
from flwr_regs.client.train.trainable import trained_parameters
from flwr_regs.cohort.batch_plan import CannotStack
from flwr_regs.cohort.finishing import Slots
from flwr_regs.cohort.member_view import Member, Shared
from flwr_regs.cohort.stacked_training import Stack, StackedResult
from flwr_regs.flower.client import RegClient
from flwr_regs.flower.node import NodeState
from flwr_regs.term import Slot
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays
from flwr_regs.wire.records import reply_of

COPIES = 6
"""Of the parameters: values, update, gradients, two states of an optimiser, and a buffer."""


@dataclass(frozen=True)
class Recipe:
    """What the messages of a round say to all clients of one kind: the method, and how long they train."""

    kind: tuple[Any, ...]
    config: Mapping[str, Any]
    term: Chain

    @cached_property
    def needs(self) -> frozenset[str]:
        """What the terms read in every step."""
        return frozenset(need for t in self.term.terms for need in t.needs)

    @cached_property
    def withholds(self) -> bool:
        """Whether clients have private entries."""
        return any(isinstance(t, Withholds) for t in self.term.terms)

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
    config: Mapping[str, Any]
    memory: Memory
    begun: Begun
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
        self.layout = load(model, term, arrays, config)
        private, trained = self.layout.private, list(self.layout.trained)
        shared = [n for n in trained if n not in private]
        if not shared:
            raise CannotStack("it trains no parameter that is shared")
        self.first = tied_names(model, ()) | _other_names(model)
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
        ended = []
        for k, c in enumerate(self.candidates):
            member = ClientMember(
                c.client._identity, self.recipe.term, c.config, self.arrays, self.layout, {},
                c.memory, c.begun,
            )  # fmt: skip
            one = self._row(result, k, c)
            ended.append(
                end_probe(member, one.upload, one.client, c.examples)
                if self.recipe.probes
                else end(member, one)
            )
        for c, (_, memory) in zip(self.candidates, ended, strict=True):
            c.node.remember(memory)
            if keys.DOWNLINK_KEY in self.recipe.config:
                c.node.keep_model(self.record)
        pairs = zip(self.candidates, ended, strict=True)
        return [Message(reply_of(reply), reply_to=c.message) for c, (reply, _) in pairs]

    def _row(self, result: StackedResult, k: int, c: Candidate) -> LocalResult:
        """Return one client's result; the entries of its model that are not trained are the first's."""
        names = {n: self.first.get(n, n) for n in [*self.arrays, *self.layout.private]}
        state = {
            n: result.state[name][k] if name in result.state else self.shared.start[n]
            for n, name in names.items()
            if not self.recipe.probes
        }
        return LocalResult(
            state, row_of(result.delta, k), slots_of(result.upload, k), slots_of(result.client, k),
            c.examples, len(c.member.plan), c.member.planned_steps,
            result.examples[k] if result.examples else 0,
            result.losses[k] if result.losses else 0.0,
            result.output_layer,
        )  # fmt: skip


def row_of(stacked: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    """Return one member's of some stacked tensors."""
    return {n: t[row] for n, t in stacked.items()}


def slots_of(slots: Slots, row: int) -> Slot:
    """Return one member's slots."""
    if isinstance(slots, list):
        return slots[row]
    return {t: row_of(own, row) for t, own in slots.items()}


def _other_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of a model's buffers -> the first, as for a layer that is there twice."""
    first: dict[int, str] = {}
    named = model.named_buffers(remove_duplicate=False)
    pairs = {n: first.setdefault(id(b), n) for n, b in named}
    return {n: f for n, f in pairs.items() if n != f}
