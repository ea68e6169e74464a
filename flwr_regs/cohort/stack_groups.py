"""Clients that train in one stack: what each brings, what they share, and their replies. Plain torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

import flwr_regs.client.member as clients
import flwr_regs.client.memory as memories
import flwr_regs.client.train.batches as data
from flwr_regs.abilities import Carries, Steers
from flwr_regs.chain import Chain
from flwr_regs.client.loading import Layout, as_kept, check_custody, found, load
from flwr_regs.client.measure.classifier import restored
from flwr_regs.client.memory import to_numpy
from flwr_regs.client.train.optimizer import optimizer_of, over
from flwr_regs.client.train.trainable import private_entries
from flwr_regs.cohort.batch_plan import CannotStack, draw, order_of
from flwr_regs.cohort.member_view import Member, View
from flwr_regs.cohort.stacked_training import Stack, StackedResult
from flwr_regs.term import Slot
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, in_code_order
from flwr_regs.wire.config import plain
from flwr_regs.wire.parcel import Parcel, Row
from flwr_regs.wire.parcel import Stack as Table
from flwr_regs.wire.precision import narrow

Records = Mapping[str, Mapping[str, np.ndarray]]
OWN_KEYS = (keys.SEED_KEY, keys.CLIENT_KEY, keys.SNAPSHOTS_KEY)
"""Entries of a message's config that are one client's."""
ON_CPU, ELSEWHERE = 2**26, 2**30
"""Bytes of a stack, by default. On a CPU, arrays that leave its caches make a step slower."""
COPIES = 6
"""Of the parameters: values, update, gradients, two states of an optimiser, and a buffer."""


@dataclass(eq=False)
class Kind:
    """What is known of the clients that could train in one stack, in this round and in later ones.

    Attributes
    ----------
    refused : str
        Why they train one by one; "" if they do not.
    checked : dict of bool to (str, float)
        Whether all of a stack take equal numbers of steps -> the training in which such a stack was checked
        last, and the round from which on the next one is. Terms that are `elementwise` run in two ways.
    """

    refused: str = ""
    checked: dict[bool, tuple[Any, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """How stacks train.

    Attributes
    ----------
    memory : int, optional
        Bytes that a stack may take, roughly; more clients train in several. Default: by the device.
    precision : torch.dtype, optional
        Of the forward pass, by torch's autocast.
    check : "first", int or False
        When two clients of a kind also train alone, to compare the results.
    compile : bool
        Whether steps run under ``torch.compile``.
    """

    memory: int | None = None
    precision: torch.dtype | None = None
    check: Literal["first", False] | int = "first"
    compile: bool = False


@dataclass(frozen=True)
class Recipe:
    """What a round says to all clients of one kind: the method, the model, how long they train.

    Attributes
    ----------
    who, config, term : Identity, mapping, Chain
    came, arrays, step : NDArrays, NDArrays, NDArrays or None
        The model as it came, and without the method's code; the last global step, where it came.
    common : mapping
        The records' entries that are the same for all clients of the round.
    """

    who: clients.Identity
    config: Mapping[str, Any]
    term: Chain
    came: NDArrays
    arrays: NDArrays
    step: Mapping[str, np.ndarray] | None
    common: Records

    @cached_property
    def probes(self) -> bool:
        """Whether this is a round's first exchange, without training."""
        return bool(self.config.get(keys.PROBE_KEY))

    def steps(self, pairs: data.Pairs) -> int:
        """Return E; for a first exchange, the batches of one pass.

        Raises CannotStack for data that have to be counted: that may draw random numbers.
        """
        if (steps := self.config.get("local-steps")) and not self.probes:
            return int(steps)
        epochs = 1 if self.probes else self.config.get("local-epochs", 0)
        try:
            return int(epochs * len(pairs))
        except TypeError:
            raise CannotStack("its data have no length") from None


class Recipes:
    """What a round says to its clients, read and checked once for all clients of a kind."""

    def __init__(self, asked: Sequence[clients.Asked]) -> None:
        first, *others = [one.message.records for one in asked] or [{}]
        common = dict(first)
        for records in others:
            for name, entries in common.items():
                if (record := records.get(name, {})) is not first[name]:
                    common[name] = {k: a for k, a in entries.items() if record.get(k) is a}
        self._known, self._common = list[Recipe](), common

    def of(self, asked: clients.Asked) -> Recipe:
        """Return what a client's message says to all clients of its kind."""
        who, message, model = asked.client.identity, asked.message, asked.client.model
        came: Any = message.records[keys.ARRAYS]
        config = {k: v for k, v in message.config.items() if k not in OWN_KEYS}
        for known in self._known:
            if known.came is came and known.who == who and known.config == config:
                return known
        term = clients.method_of(who, config)
        term.restrict(config)
        carry = [t.name for t in term.terms if isinstance(t, Carries) and not isinstance(t, Steers)]
        if carry and any(t.acts("client_optimizer") for t in term.terms):
            raise CannotStack(f"{carry} carry the state of an optimiser in which others have a say")
        arrays, step = clients.model_of(message, model, term)
        self._known.append(Recipe(who, config, term, came, arrays, step, self._common))
        return self._known[-1]


class Group:
    """Clients that train in one stack.

    Parameters
    ----------
    first : Member
        Its client's model becomes the stack's, and is loaded.
    recipe : Recipe
    settings : Settings
    kind : Kind

    Attributes
    ----------
    members : list of Member
    view : View
        What they share.
    room : int
        Bytes for more clients; below 0 where there are none for another one.
    """

    def __init__(self, first: Member, recipe: Recipe, settings: Settings, kind: Kind) -> None:
        client, term, config = first.asked.client, recipe.term, recipe.config
        model = client.model
        self.recipe, self.kind, self.members = recipe, kind, list[Member]()
        self.layout: Layout = load(model, term, recipe.arrays, config)
        private, trained = self.layout.private, list(self.layout.trained)
        params = list(self.layout.trained.values())
        first_of: dict[int, str] = {}
        places = model.state_dict(keep_vars=True).items()
        self._first_names = {n: first_of.setdefault(id(v), n) for n, v in places}
        entries = {n: v.detach().clone() for n, v in places if n not in private}
        self._one: int = COPIES * sum(entries[n].nbytes for n in trained if n in entries)
        device = data.resolve_device(client.device)
        default = ON_CPU if device.type == "cpu" else ELSEWHERE
        self.room = (settings.memory or default) - self._one
        came = recipe.common, recipe.step, self.layout.trained, config
        self.view = View(
            model=model,
            term=term,
            task=client.task,
            device=device,
            entries=entries,
            trained=trained,
            make=term.client_optimizer(over(params, optimizer_of(config, client.optimizer))),
            broadcast=clients.broadcast_of(term, *came),
            same={"lr": config["lr"], "config": plain(config)},
            classifier=client.classifier,
            precision=settings.precision,
        )

    def add(self, member: Member) -> None:
        """Take a client of the same kind."""
        self.members.append(member)
        self.room -= self._one + member.plan.nbytes

    def run(self, stack: Stack | None = None) -> StackedResult:
        """Train the clients in a stack; default: all of them. No client's state has changed by then.

        What does not travel is then as before; raise CannotStack if the round changes it. A client may keep
        its model for the next round, and with it such a buffer, or a number that counts its calls.
        """
        if whole := stack is None:
            self.members.sort(key=lambda m: -len(m.plan))
            stack = Stack(self.view, self.members)
        model, misread = self.view.model, self.view.misread
        misread.clear()
        with restored(model, self.view.task.loss_fn) as both:
            before = _numbers(both)
            result = stack.probe() if self.recipe.probes else stack.run()
            counted = {n for a, b in zip(before, _numbers(both), strict=True) for n, _ in a ^ b}
        if whole and counted:  # the check by result has not seen it
            self.kind.refused = f"the round changes its model's or loss's {sorted(counted)}"
            raise CannotStack(self.kind.refused)
        if misread and torch.stack(misread).any():
            raise CannotStack("an embedding or one_hot gets an index that is out of range")
        held = {n: b.cpu() for n, b in model.named_buffers() if n not in self._first_names}
        also = [n for n in held if n in result.state]
        equal = partial(torch.isclose, rtol=0, atol=0, equal_nan=True)
        if odd := [n for n in also if not equal(result.state[n], held[n]).all()]:
            raise CannotStack(f"the round changes {odd}, which the model's state_dict lacks")
        return result

    # replies

    def replies(self, result: StackedResult) -> dict[int, clients.Answer]:
        """Return what came of the clients: their replies are rows of the result."""
        recipe, layout, was = self.recipe, self.layout, self.recipe.arrays
        uploads, kept = _tables(result.upload), _tables(result.client)
        common: dict[str, Any] = {keys.METHOD_KEY: recipe.who.method}
        sent, private, code = Table({}), Table({}), Table({})
        if not recipe.probes:
            common |= clients.model_entries(recipe.config, was, layout, result.output_layer)
            first = self._first_names
            ended = {n: to_numpy(result.state[first[n]]) for n in (*was, *layout.private)}
            sent = Table({n: ended[n].astype(a.dtype, copy=False) for n, a in was.items()})
            private = Table({n: ended[n] for n in layout.private})
            if recipe.term.coder("finish") is None:
                sent = Table(narrow(sent, recipe.config.get(keys.HALF_KEY)))
            else:
                deltas = in_code_order(result.delta, result.delta)
                code = Table({n: to_numpy(d).astype(was[n].dtype) for n, d in deltas.items()})
        exact = False  # whether what is decoded is what was coded
        served: dict[int, clients.Answer] = {}
        for row, c in enumerate(self.members):
            message, config = c.asked.message.config, dict(common)
            slots, entries = {t: Row(of_all, row) for t, of_all in kept.items()}, Row(private, row)
            said: list[str] = []
            records: dict[str, Any] = {f"{t}.upload": Row(u, row) for t, u in uploads.items()}
            metrics: dict[str, Any] = {"num-examples": data.count_examples(c.plan.data)}
            if not recipe.probes:
                said += [f"keeps {what}" for what in memories.kinds(message, slots, entries)]
                said += [keys.LOSS_ROSE] * result.rose[row]
                records[keys.ARRAYS] = Row(sent, row)
                if code:
                    update = Row(code, row), Row(sent, row), was, layout
                    steps, records[keys.ARRAYS] = clients.coded(recipe.term, *update)
                    exact = _is_exact(recipe.term, steps[0], Row(code, 0)) if row == 0 else exact
                    config[keys.STEPS_KEY] = steps
                metrics |= {
                    "train-loss": result.losses[row],
                    "local-steps": len(c.plan),
                    "planned-steps": c.planned_steps,
                    "examples-processed": sum(c.plan.sizes),
                }
            config |= clients.reply_entries(message, c.begun, said)
            held = memories.end(c.asked.memory, message, slots, entries, recipe.who.method)
            reply = Parcel(records, config, metrics, decoded=Row(code, row) if exact else None)
            served[c.asked.pid] = clients.Answer(reply, held, was)
        return served


def _is_exact(term: Chain, code: bytes, update: Mapping[str, np.ndarray]) -> bool:
    """Whether a term's code of an update gives it back to the bit."""
    coder: Any = term.coder("finish")
    decoded = coder.decode(code, update)
    return all(np.array_equal(decoded[n], a, equal_nan=True) for n, a in update.items())


def _numbers(modules: nn.Module) -> list[set[tuple[str, float]]]:
    """Return the numbers that each module has as attributes."""
    each = [vars(m).items() for m in modules.modules()]
    return [{(n, v) for n, v in items if type(v) in (int, float)} for items in each]


def _tables(slots: Slot) -> dict[str, Table]:
    """Return the clients' slots by term as arrays, a row each; without empty ones."""
    return {t: Table({k: to_numpy(a) for k, a in s.items()}) for t, s in slots.items() if s}


def member_of(asked: clients.Asked, recipe: Recipe) -> Member:
    """Return a client with its data, its slots, and its batches of the round."""
    client, term, message = asked.client, recipe.term, asked.message
    pairs, seed = client.task.pairs(client.train_data), message.config[keys.SEED_KEY]
    if client.identity.private:
        check_custody(client.identity.private, client.model, term)
    names = private_entries(client.model, term)
    begun = memories.begin(asked.memory, term, message.config, bool(names))
    entries = client.model.state_dict() if names else {}
    values = {n: v for n, v in entries.items() if n in names}
    kept = begun.private
    private = found(client.model, values) if kept is None else as_kept(kept, values)
    planned = recipe.steps(pairs)
    budget = None if recipe.probes else client.step_budget
    most = planned if budget is None else min(planned, budget)
    if not most:
        raise CannotStack("it takes no step")
    own = {
        name: {k: a for k, a in record.items() if k not in recipe.common.get(name, ())}
        for name, record in message.records.items()
        if len(record) > len(recipe.common.get(name, ()))
    }
    broadcast = clients.broadcast_of(term, own, None, (), {}) if own else {}
    counts, classes = None, 0
    if any("label_counts" in t.needs for t in term.terms):
        with data.seeded(seed, torch.device("cpu")):  # as a client alone counts them
            counts = data.label_counts(pairs)
        if recipe.probes or any(t.acts("start") for t in term.terms):
            classes = len(counts)  # a term may see them before a forward pass tells the number
    form = (_form_of(broadcast), _form_of(begun.slots), *sorted(private), classes)
    plan = draw(pairs, torch.Generator().manual_seed(seed), order_of(pairs), most)
    return Member(plan, planned, private, broadcast, counts, asked, begun, form)


def _form_of(slots: Slot) -> Hashable:
    """Return which arrays there are in slots, and of which shape."""
    return frozenset((t, k, a.shape, a.dtype) for t, s in slots.items() for k, a in s.items())
