"""Clients that train in one stack: what each brings, which go together, and their replies.

It does for many clients at once what node.py, translation.py, client/received.py and the NumPyClient do for
one. What they share (the config, the model, the method) is read once. Whoever needs more than that trains
by itself: CannotStack says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from flwr_regs.abilities import TakesBack, Withholds
from flwr_regs.chain import Chain
from flwr_regs.client import state
from flwr_regs.client.alike import alike, build_of
from flwr_regs.client.batches import (
    Pairs,
    count_batches,
    count_examples,
    label_counts,
    resolve_device,
)
from flwr_regs.client.custody import check_custody
from flwr_regs.client.frozen import held_still
from flwr_regs.client.loading import load, tied_names
from flwr_regs.client.optimizer import optimizer_of
from flwr_regs.client.plan import CannotStack, draw
from flwr_regs.client.received import _method, plain
from flwr_regs.client.stack_view import Shared
from flwr_regs.client.stacked import Member, Stack, StackedResult
from flwr_regs.client.state import ClientState, to_numpy
from flwr_regs.client.training import trained_parameters
from flwr_regs.flower.client import RegClient
from flwr_regs.flower.node import AT_ONCE, NodeState, _check_incoming
from flwr_regs.term import Slot
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, in_code_order, mask
from flwr_regs.wire.delta import model_from
from flwr_regs.wire.frozen import read_said, said
from flwr_regs.wire.records import from_record, to_record

OWN_KEYS = (keys.SEED_KEY, keys.CLIENT_KEY, keys.USED_KEY)
"""Entries of a message's config that are one client's."""
COPIES = 6
"""Of the parameters: values, update, gradients, two states of an optimiser, and a buffer."""
_OVERRIDES = ("fit", "to_client", "_task", "_method_name", "_named")


@dataclass(frozen=True)
class Recipe:
    """What the messages of a round say to all clients of one kind: the method, and how long they train."""

    kind: tuple[Any, ...]
    config: Mapping[str, Any]
    method: str
    term: Chain

    def steps(self, data: Pairs) -> int:
        """Return E."""
        return int(
            self.config.get("local-steps")
            or self.config.get("local-epochs", 0) * count_batches(data)
        )


@dataclass(frozen=True)
class Candidate:
    """A client that can train in a stack, with what it brings; the model travels apart."""

    message: Message
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
    """

    def __init__(
        self,
        first: Candidate,
        record: ArrayRecord,
        arrays: NDArrays,
        broadcast: Slot,
        precision: torch.dtype | None,
    ) -> None:
        client, term, config = first.client, first.recipe.term, first.recipe.config
        model = client.model
        self.recipe, self.record, self.arrays = first.recipe, record, arrays
        self.candidates: list[Candidate] = []
        self._fixed = self._fixed_of(model)
        private, anew = load(model, term, arrays, config)
        if anew:
            raise CannotStack("its frozen parameters are not the server's")
        trained = list(trained_parameters(model, term))
        tied = {n: f for n, f in tied_names(model, private).items() if f in trained}
        names, shared = list(arrays), [n for n in trained if n not in private]
        if not shared:
            raise CannotStack("it trains no parameter that is shared")
        buffers = [n for n in names if n not in shared]
        still = held_still(model, term, private)
        self.texts: dict[str, Any] = {
            keys.METHOD_KEY: self.recipe.method,
            keys.BUFFERS_KEY: mask(buffers, names),
        }
        if keys.FROZEN_DIGEST_KEY not in config and still:
            self.texts |= said(still)
        if tied:
            self.texts[keys.TIED_KEY] = json.dumps(tied)
        self._tied, self._buffers, self._private = tied_names(model, ()), buffers, private
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

    @property
    def kind(self) -> Hashable:
        """What decides how fast its clients train."""
        first = self.candidates[0].member
        terms = tuple(type(t) for t in self.recipe.term.terms)
        return build_of(self.shared.model), first.plan.forms[0], terms, str(self.shared.device)

    @property
    def may_lose(self) -> bool:
        """Whether a loop may be faster: convolutions and recurrent layers on a CPU."""
        model, on_cpu = self.shared.model, self.shared.device.type == "cpu"
        slow = (nn.modules.conv._ConvNd, nn.RNNBase)
        return on_cpu and any(isinstance(m, slow) for m in model.modules())

    def part(self, clients: int) -> list[Candidate]:
        """Take some clients out of the group, if it is large enough; return them."""
        if not clients or len(self.candidates) < 2 * clients:
            return []
        self.candidates, out = self.candidates[:-clients], self.candidates[-clients:]
        return out

    def is_full(self, memory: int) -> bool:
        """Whether another client would take more than `memory` bytes."""
        return (len(self.candidates) + 1) * self._one + self._drawn > memory

    def run(self) -> list[Message]:
        """Train the clients; return their replies, in their order.

        Whatever is raised, no client's state has changed by then.
        """
        members = [c.member for c in self.candidates]
        result = Stack(self.shared, members, self.candidates[0].seed).run()
        make = Replies(self, result)
        made = [make.content(k, c) for k, c in enumerate(self.candidates)]
        for c, (_, kept) in zip(self.candidates, made, strict=True):
            c.node.keep_slots(kept)
            if self.recipe.config.get(keys.KEEP_KEY):
                c.node.keep_model(make.record)
        pairs = zip(self.candidates, made, strict=True)
        return [Message(content, reply_to=c.message) for c, (content, _) in pairs]


class Replies:
    """The contents of a stack's replies."""

    def __init__(self, group: Group, result: StackedResult) -> None:
        self._group, self._result = group, result
        self._last: dict[str, tuple[Any, Mapping[str, Any]]] = {}
        self._term = group.recipe.term
        given = group.arrays
        first = group._tied
        held = group.shared.start
        self._all = {}
        for n, a in given.items():
            name = first.get(n, n)
            if name in result.state:
                self._all[n] = np.ascontiguousarray(_numpy(result.state[name], a.dtype))
            else:
                self._all[n] = _numpy(held[n].cpu(), a.dtype)[None]
        texts = dict(group.texts)
        if result.output_layer is not None:
            texts[keys.LAYER_KEY] = result.output_layer
        self._texts = texts
        names, _ = read_said(texts)
        self.record = ArrayRecord({n: a for n, a in group.record.items() if n not in names})
        self._coder = self._term.coder("finish")
        sends = any(isinstance(t, TakesBack) for t in self._term.terms) or self._coder is not None
        self._sent = {n: _numpy(d, given[n].dtype) for n, d in result.delta.items() if sends}

    def content(self, k: int, c: Candidate) -> tuple[RecordDict, dict[str, ArrayRecord]]:
        """Return a client's reply, and the records that its node keeps."""
        group, result = self._group, self._result
        sent = {n: d[k] for n, d in self._sent.items()}
        texts, code = dict(self._texts), None
        new = {n: a[k if len(a) > 1 else 0] for n, a in self._all.items()}
        if self._coder is not None:
            code = texts[keys.UPDATE_KEY] = self._coder.encode(in_code_order(sent, sent))
            own = [n for n in group._buffers if n not in group._tied]
            new = {n: new[n] for n in own if not np.array_equal(new[n], group.arrays[n])}
        entries = state.entries(
            self._term, c.kept, result.client[k], sent=sent, code=code, form=record_of
        )
        if private := {n: to_numpy(result.state[n][k]) for n in group._private}:
            entries[keys.PRIVATE_KEY] = record_of(private)
            if c.fresh:
                texts[keys.FRESH_KEY] = True
        if c.lost:
            texts[keys.LOST_KEY] = True
        kept = {n: v for n, v in entries.items() if isinstance(v, ArrayRecord)}
        texts |= {n: v for n, v in entries.items() if n not in kept}
        if c.node.ahead and any(name.endswith(AT_ONCE) for name in c.slots):
            texts[keys.AHEAD_KEY] = True
        records: dict[str, Any] = {
            f"{t}.upload": record_of({n: to_numpy(a) for n, a in slot.items()})
            for t, slot in result.upload[k].items()
            if slot
        }
        records[keys.ARRAYS] = record_of(new)
        numbers = {
            "train-loss": result.losses[k],
            "local-steps": len(c.member.plan),
            "planned-steps": c.member.planned_steps,
            "examples-processed": result.examples[k],
            "num-examples": c.examples,
        }
        records[keys.METRICS] = self._like("numbers", MetricRecord, numbers)
        records[keys.CONFIG] = self._like("texts", ConfigRecord, texts)
        return RecordDict(records), kept

    def _like(self, name: str, kind: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        """Return a record of these values: a copy of the last client's, which Flower has checked."""
        like, known = self._last.get(name, (None, {}))
        if like is None or known.keys() != values.keys():
            record = kind(dict(values))
        else:
            record = like.copy()
            for key, value in values.items():
                if value is not known[key] and value != known[key]:
                    record[key] = value
        self._last[name] = record, values
        return record


class Cohort:
    """The train messages that were pushed at once, and the groups in which their clients train.

    Parameters
    ----------
    messages : sequence of Message
    precision : torch.dtype or None
    """

    def __init__(self, messages: Sequence[Message], precision: torch.dtype | None) -> None:
        self._precision = precision
        ids: dict[str, set[int]] = {}
        for message in messages:
            for name, record in message.content.items():
                ids.setdefault(name, set()).add(id(record))
        self._alike = {name for name, found in ids.items() if len(found) == 1}
        self._decoded: dict[int, tuple[ArrayRecord, NDArrays]] = {}
        self._models: list[_Model] = []
        self._recipes: list[Recipe] = []
        self._model: nn.Module | None = None  # of the last client, and its build
        self._build: Hashable = None
        self.groups: dict[Hashable, Group] = {}

    def admit(self, message: Message, context: Context, client: Any) -> Hashable:
        """Put a client into its group; return the group's key. Raises CannotStack if it has none."""
        check_client(client)
        content = message.content
        entries = content.config_records[keys.CONFIG]
        _check_incoming(entries, context)
        config = dict(entries)
        own = {k: config.pop(k) for k in OWN_KEYS if k in config}
        check_message(config, content)
        recipe = self._recipe(client, config)
        node = NodeState(context, entries)
        if node.frozen is not None:
            raise CannotStack("it keeps frozen parameters of the server's")
        sent = self._sent(config, content, node)
        candidate = self._candidate(message, context, client, recipe, node, own, sent)
        if client.model is not self._model:
            self._model, self._build = client.model, build_of(client.model)
        member, task = candidate.member, client._task
        key = (
            id(recipe), id(sent), self._build, alike((task.loss_fn, task.target_key, task.output_fn)),
            alike(client.optimizer), str(client.device), client.classifier, member.plan.kind,
            member.plan.forms[0], _form(member.broadcast), _form(member.client), *member.own,
            None if member.label_counts is None else "counts",
        )  # fmt: skip
        if key not in self.groups:
            shared = self._broadcast(recipe.term, content, True)
            if sent.step is not None:
                trained = trained_parameters(client.model, recipe.term)
                steps = {n: torch.from_numpy(a) for n, a in sent.step.items() if n in trained}
                lr: Any = config[keys.PREVIOUS_LR_KEY]
                recovered = recipe.term.recover(steps, lr)
                for name, slot in recovered.items():
                    shared[name] = {**slot, **shared.get(name, {})}
            self.groups[key] = Group(candidate, sent.record, sent.arrays, shared, self._precision)
        self.groups[key].add(candidate)
        return key

    def _recipe(self, client: RegClient, config: Mapping[str, Any]) -> Recipe:
        """Return the method of a message, read and checked once for all clients of a kind."""
        kind = (type(client).__name__, client.method, tuple(client.terms))
        for found in self._recipes:
            if found.kind == kind and found.config == config:
                return found
        method = client._method_name()
        who = f"this client is {type(client).__name__} ({method})"
        term = _method(method, client.terms, who, config)
        term.restrict(config)
        self._recipes.append(Recipe(kind, config, method, term))
        return self._recipes[-1]

    def _candidate(
        self, message: Message, context: Context, client: RegClient, recipe: Recipe, node: NodeState,
        own: Mapping[str, Any], sent: _Model,
    ) -> Candidate:  # fmt: skip
        term, model, pairs = recipe.term, client.model, client._task.pairs(client.train_data)
        check_custody(client.private, model, term)
        slots = node.entering()
        held = {n: from_record(r) for n, r in slots.items() if n != keys.PRIVATE_KEY}
        config = {**recipe.config, **own, **held}
        kept = ClientState.read(term, config)
        update: NDArrays = {}
        if held and any(isinstance(t, TakesBack) for t in term.terms):
            trained = trained_parameters(model, term)
            update = {n: a for n, a in sent.arrays.items() if n in trained}
        entering, lost = kept.entering(term, config, update)
        lost |= keys.USED_KEY in config and kept == ClientState()
        planned = recipe.steps(pairs)
        most = planned if client.step_budget is None else min(planned, client.step_budget)
        if not most:
            raise CannotStack("it takes no step")
        private = self._private(model, term, slots)
        needs = {need for t in term.terms for need in t.needs}
        member = Member(
            draw(pairs, own[keys.SEED_KEY], most),
            planned,
            private,
            self._broadcast(term, message.content, False),
            {n: slot for n, slot in {**entering.settled, **entering.pending}.items() if slot},
            own.get(keys.CLIENT_KEY, -1),
            _label_counts(pairs, own[keys.SEED_KEY]) if "label_counts" in needs else None,
        )
        fresh = bool(private) and keys.PRIVATE_KEY not in slots
        return Candidate(
            message, context, client, recipe, node, slots, entering, lost, fresh, member,
            count_examples(pairs), own[keys.SEED_KEY],
        )  # fmt: skip

    def _private(
        self, model: nn.Module, term: Chain, slots: Mapping[str, ArrayRecord]
    ) -> dict[str, Tensor]:
        """Return a client's private entries: those that its node kept, or its model's own."""
        if not any(isinstance(t, Withholds) for t in term.terms):
            return {}
        entries = model.state_dict()
        chosen = term.private(list(entries))
        mine = {n: v.detach().clone() for n, v in entries.items() if n in chosen}
        if not mine or keys.PRIVATE_KEY not in slots:
            if mine and model is self._model:
                raise CannotStack(
                    "its model is another client's too, and holds new private entries"
                )
            return mine
        kept = self._read(slots[keys.PRIVATE_KEY])
        if {n: a.shape for n, a in kept.items()} != {n: tuple(v.shape) for n, v in mine.items()}:
            raise CannotStack("the private entries that it kept are not its model's")
        return {n: torch.from_numpy(kept[n]).to(v.dtype) for n, v in mine.items()}

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
                arrays = self._read(content.array_records[name])
                found[t.name] = {k: torch.from_numpy(a) for k, a in arrays.items()}
        return found

    def _sent(self, config: Mapping[str, Any], content: RecordDict, node: NodeState) -> _Model:
        """Return the global model of a message; rebuilt once for all that kept the same one."""
        record = content.array_records[keys.ARRAYS]
        base = None
        if keys.DOWNLINK_KEY in config:
            base = node.kept_model(config[keys.BASE_ROUND_KEY])
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


def check_client(client: Any) -> None:
    """Raise CannotStack for a client that does not train as every RegClient does."""
    if not isinstance(client, RegClient):
        raise CannotStack(f"{type(client).__name__} is no client of this package")
    name, own = type(client).__name__, type(client)
    for method in _OVERRIDES:
        if getattr(own, method) is not getattr(RegClient, method) or method in vars(client):
            raise CannotStack(f"{name} has a {method} of its own")
    settings = ("time_budget", "save_private")
    if given := [s for s in settings if getattr(client, s) is not None]:
        raise CannotStack(f"{name} has a {given[0]}")
    if client.keep_optimizer:
        raise CannotStack(f"{name} keeps its optimiser")
    if any(n.endswith("_orig_mod") for n, _ in client.model.named_modules()):
        raise CannotStack(f"{name} has a compiled model")


def check_message(config: Mapping[str, Any], content: RecordDict) -> None:
    """Raise CannotStack for a message that needs more than a stack does."""
    reasons = {
        keys.ASK_KEY: "the server asks for frozen parameters",
        keys.HALF_KEY: "the model travels in half precision",
    }
    for key, why in reasons.items():
        if config.get(key):
            raise CannotStack(why)
    if config.get(keys.DOWNLINK_KEY) == "coded":
        raise CannotStack("the downlink is coded")
    if keys.FROZEN in content:
        raise CannotStack("frozen parameters come with the message")


def record_of(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return an ArrayRecord, as :func:`.records.to_record`; the header of a shape is made once."""
    record = ArrayRecord()
    for n, a in arrays.items():  # given all at once, each would be made twice
        record[n] = _array(a)
    return record


def _array(a: np.ndarray) -> Array:
    head, kind = _header(a.dtype, a.shape)
    return Array(kind, a.shape, "numpy.ndarray", head + a.tobytes())


@cache
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, str]:
    """Return the beginning of an array's ``.npy`` file, and the name of its dtype."""
    file = BytesIO()
    like = np.broadcast_to(np.zeros((), dtype), shape)
    described = {**np.lib.format.header_data_from_array_1_0(like), "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue(), str(dtype)


def _numpy(tensor: Tensor, dtype: np.dtype[Any]) -> np.ndarray:
    return to_numpy(tensor).astype(dtype, copy=False)


def _form(slots: Slot) -> Hashable:
    """Return which arrays there are in slots, and of which shape."""
    return tuple(
        (t, tuple((k, tuple(a.shape), a.dtype) for k, a in sorted(own.items())))
        for t, own in sorted(slots.items())
    )


def _equal(a: ArrayRecord | None, b: ArrayRecord | None) -> bool:
    if a is None or b is None or a is b:
        return a is b
    return a.keys() == b.keys() and all(a[n].data == b[n].data for n in a)


def _label_counts(pairs: Pairs, seed: int) -> Tensor:
    """Return the client's label counts, as :class:`.training.LocalTraining` counts them."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return label_counts(pairs)
