"""Clients that train in one stack: what each brings, and which go together.

It does for many clients at once what node.py, translation.py, client/member.py and the
NumPyClient do for one. What they share (the config, the model, the method) is read once. Whoever needs
more than that trains by itself: CannotStack says why.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor, nn

from flwr_regs.abilities import Carries, Steers
from flwr_regs.chain import Chain
from flwr_regs.client.loading import check_custody
from flwr_regs.client.member import method_of
from flwr_regs.client.memory import Begun, begin
from flwr_regs.client.train.batches import (
    Pairs,
    count_examples,
    label_counts,
)
from flwr_regs.client.train.trainable import trained_parameters
from flwr_regs.cohort.alike import alike, build_of
from flwr_regs.cohort.batch_plan import CannotStack, draw
from flwr_regs.cohort.member_view import Member
from flwr_regs.flower.client import RegClient
from flwr_regs.flower.grids.stacked_group import Candidate, Group, Kind, Recipe
from flwr_regs.flower.node import NodeState, check_incoming
from flwr_regs.term import Slot
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays
from flwr_regs.wire.delta import model_from
from flwr_regs.wire.records import from_record, to_record

OWN_KEYS = (keys.SEED_KEY, keys.CLIENT_KEY, keys.USED_KEY, keys.CAME_KEY)
"""Entries of a message's config that are one client's."""
_Record = TypeVar("_Record", ArrayRecord, ConfigRecord)
_OVERRIDES = ("fit", "to_client", "_task", "_identity", "_message")


class Cohort:
    """The train messages that were pushed at once, and the groups in which their clients train.

    Parameters
    ----------
    messages : sequence of Message
    precision : torch.dtype or None
    kinds : mapping
        The kinds of clients that earlier cohorts had.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        precision: torch.dtype | None,
        kinds: Mapping[Hashable, Kind],
    ) -> None:
        self._precision, self._kinds = precision, dict(kinds)
        ids: dict[str, set[int]] = {}
        for message in messages:
            for name, record in message.content.items():
                ids.setdefault(name, set()).add(id(record))
        self._alike = {name for name, found in ids.items() if len(found) == 1}
        self._decoded: dict[int, tuple[ArrayRecord, NDArrays]] = {}
        self._models: list[_Model] = []
        self._recipes: list[Recipe] = []
        self._plain: set[type] = set()  # classes that train as RegClient does
        self.groups: dict[Hashable, Group] = {}

    def admit(
        self,
        message: Message,
        context: Context,
        client: Any,
        before: Mapping[str, Any],
        drawn: Tensor,
    ) -> Hashable:
        """Put a client into its group; return the group's key. Raises CannotStack if it has none.

        `before` is its state before `client_fn`, and `drawn` that of torch's random generator.
        """
        check_client(client, self._plain)
        content = message.content
        entries: dict[str, Any] = dict(_record(content, keys.CONFIG, ConfigRecord).items())
        check_incoming(entries, context)
        config = dict(entries)
        own = {k: config.pop(k) for k in OWN_KEYS if k in config}
        check_message(config)
        recipe = self._recipe(client, config)
        node = NodeState(context, entries)
        if any(name.endswith("_orig_mod") for name, _ in client.model.named_modules()):
            raise CannotStack(f"{type(client).__name__} has a compiled model")
        called = alike((client.loss_fn, client.target_key, client.output_fn, client.optimizer))
        build = build_of(client.model)
        like = recipe.kind, recipe.probes, build, called, str(client.device), client.classifier
        kind = self._kinds.setdefault(like, Kind(like))
        if kind.refused:
            raise CannotStack(kind.refused)
        sent = self._sent(config, content, node)
        candidate = self._candidate(
            message, before, drawn, context, client, recipe, node, own, sent
        )
        member = candidate.member
        key = (
            id(recipe),
            id(sent),
            kind,
            member.plan.kind,
            member.plan.forms[0],
            _form(member.broadcast),
            _form(member.client),
            tuple(member.private),
            _counted(recipe.term, member),
            tuple(n for n in content if n in self._alike),  # the first client's are all clients'
        )
        if (group := self.groups.get(key)) is None:
            shared = self._broadcast(recipe.term, content, True)
            if sent.step is not None:
                trained = trained_parameters(client.model, recipe.term)
                steps = {n: torch.from_numpy(a) for n, a in sent.step.items() if n in trained}
                lr: Any = config[keys.PREVIOUS_LR_KEY]
                recovered = recipe.term.recover(steps, lr)
                for name, slot in recovered.items():
                    shared[name] = {**slot, **shared.get(name, {})}
            group = Group(candidate, sent.record, sent.arrays, shared, self._precision, kind)
            self.groups[key] = group
        group.add(candidate)
        return key

    def _recipe(self, client: RegClient, config: Mapping[str, Any]) -> Recipe:
        """Return the method of a message, read and checked once for all clients of a kind."""
        who = client._identity
        kind = (who.who, who.method, tuple(who.terms), who.keeps_optimizer)
        for found in self._recipes:
            if found.kind == kind and found.config == config:
                return found
        term = method_of(who, config)
        term.restrict(config)
        if config.get(keys.PROBE_KEY) and any("label_counts" in t.needs for t in term.terms):
            raise CannotStack("a first exchange with label counts goes one by one")
        keeping = [
            t.name for t in term.terms if isinstance(t, Carries) and not isinstance(t, Steers)
        ]
        if keeping and any(t.acts("client_optimizer") for t in term.terms):
            raise CannotStack(
                f"{keeping} carry the state of an optimiser in which others have a say"
            )
        self._recipes.append(Recipe(kind, config, term))
        return self._recipes[-1]

    def _candidate(
        self, message: Message, before: Mapping[str, Any], drawn: Tensor, context: Context,
        client: RegClient, recipe: Recipe, node: NodeState, own: Mapping[str, Any], sent: _Model,
    ) -> Candidate:  # fmt: skip
        term, model, pairs = recipe.term, client.model, client._task.pairs(client.train_data)
        check_custody(client.private, model, term)
        held, config = node.memory, {**recipe.config, **own}
        begun = begin(held, term, config, recipe.withholds)
        planned = recipe.steps(pairs)
        budget = None if recipe.probes else client.step_budget
        most = planned if budget is None else min(planned, budget)
        if not most:
            raise CannotStack("it takes no step")
        private = self._private(model, term, begun) if recipe.withholds else {}
        member = Member(
            draw(pairs, own[keys.SEED_KEY], most),
            planned,
            private,
            self._broadcast(term, message.content, False),
            begun.slots,
            own.get(keys.CLIENT_KEY, -1),
            _label_counts(pairs, own[keys.SEED_KEY]) if "label_counts" in recipe.needs else None,
        )
        return Candidate(
            message, before, drawn, context, client, recipe, node, config, held, begun,
            member, count_examples(pairs), own[keys.SEED_KEY],
        )  # fmt: skip

    def _private(self, model: nn.Module, term: Chain, begun: Begun) -> dict[str, Tensor]:
        """Return a client's private entries: those that its node kept, or its model's own."""
        entries = model.state_dict()
        chosen = term.private(list(entries))
        mine = {n: v.detach().clone() for n, v in entries.items() if n in chosen}
        if not mine or begun.private is None:
            return mine
        if {n: a.shape for n, a in begun.private.items()} != {n: v.shape for n, v in mine.items()}:
            raise CannotStack("the private entries that it kept are not its model's")
        return {n: begun.private[n].to(v.dtype) for n, v in mine.items()}

    def _read(self, record: ArrayRecord) -> NDArrays:
        """Return the arrays of a record; decoded once, however many clients have it."""
        if id(record) not in self._decoded:
            self._decoded[id(record)] = record, from_record(record)
        return self._decoded[id(record)][1]

    def _broadcast(self, term: Chain, content: RecordDict, shared: bool) -> Slot:
        """Return the terms' broadcasts that all clients share, or those that are one client's own."""
        found: Slot = {}
        for t in term.terms:
            name = f"{t.name}.broadcast"
            if name in content and (name in self._alike) == shared:
                arrays = self._read(_record(content, name, ArrayRecord))
                found[t.name] = {k: torch.from_numpy(a) for k, a in arrays.items()}
        return found

    def _sent(self, config: Mapping[str, Any], content: RecordDict, node: NodeState) -> _Model:
        """Return the global model of a message; rebuilt once for all that kept the same one."""
        record = _record(content, keys.ARRAYS, ArrayRecord)
        base = None
        if keys.DOWNLINK_KEY in config:
            base = node.model(config[keys.BASE_ROUND_KEY])
            if base is None:
                raise CannotStack("it lacks the model that the message builds on")
        for found in self._models:
            if _equal(found.came, record) and _equal(found.base, base):
                return found
        arrays, step, kept = self._read(record), None, record
        if base is not None:
            arrays, step = model_from(config, arrays, self._read(base))
            kept = base if config[keys.DOWNLINK_KEY] == "kept" else to_record(arrays)
        self._models.append(_Model(record, base, kept, arrays, step))
        return self._models[-1]


@dataclass(frozen=True)
class _Model:
    """A global model as it `came`, upon a `base`; and what became of it."""

    came: ArrayRecord
    base: ArrayRecord | None
    record: ArrayRecord
    arrays: NDArrays
    step: NDArrays | None


def check_client(client: Any, plain: set[type]) -> None:
    """Raise CannotStack for a client that does not train as every RegClient does.

    Its class is noted in `plain` if it overrides nothing.
    """
    if not isinstance(client, RegClient):
        raise CannotStack(f"{type(client).__name__} is no client of this package")
    name, kind, own = type(client).__name__, type(client), vars(client)
    for method in _OVERRIDES:
        changed = kind not in plain and getattr(kind, method) is not getattr(RegClient, method)
        if changed or method in own:
            raise CannotStack(f"{name} has a {method} of its own")
    plain.add(kind)
    settings = ("time_budget", "save_private")
    if given := [s for s in settings if getattr(client, s) is not None]:
        raise CannotStack(f"{name} has a {given[0]}")


def check_message(config: Mapping[str, Any]) -> None:
    """Raise CannotStack for a message that needs more than a stack does."""
    if config.get(keys.HALF_KEY):
        raise CannotStack("the model travels in half precision")
    if config.get(keys.DOWNLINK_KEY) == "coded":
        raise CannotStack("the downlink is coded")


def _record(content: RecordDict, name: str, kind: type[_Record]) -> _Record:
    """Return a record of a message; Flower's own views of a content are made anew at each call."""
    if not isinstance(found := content.get(name), kind):
        raise CannotStack(f"the message holds no {kind.__name__} '{name}'")
    return found


def _counted(term: Chain, member: Member) -> Hashable:
    """Return whether there are label counts; if `start` may read them, how many: it sees no more."""
    counts = member.label_counts
    reads = any(t.acts("start") for t in term.terms)
    return counts is not None and (not reads or len(counts))


def _form(slots: Slot) -> Hashable:
    """Return which arrays there are in slots, and of which shape."""
    return tuple((t, _form_of(own)) for t, own in sorted(slots.items()))


def _form_of(slot: Mapping[str, Tensor]) -> Hashable:
    return tuple((k, tuple(a.shape), a.dtype) for k, a in sorted(slot.items()))


def _equal(a: ArrayRecord | None, b: ArrayRecord | None) -> bool:
    if a is None or b is None or a is b:
        return a is b
    return a.keys() == b.keys() and all(a[n].data == b[n].data for n in a)


def _label_counts(pairs: Pairs, seed: int) -> Tensor:
    """Return the client's label counts, as :class:`.training.LocalTraining` counts them."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return label_counts(pairs)
