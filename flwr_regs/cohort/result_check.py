"""The check of a stack by its result: two of its clients train alone as well, and must end the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flwr_regs.client.measure.classifier import restored
from flwr_regs.client.member import begin, first_exchange, measures, trained
from flwr_regs.client.train.batches import Batches, mapped, seeded, to_device, undisturbed
from flwr_regs.client.train.task import uncompiled
from flwr_regs.cohort.batch_plan import plan_of
from flwr_regs.cohort.member_view import Member
from flwr_regs.cohort.stack_groups import Group
from flwr_regs.cohort.stacked_training import Stack, StackedResult
from flwr_regs.term import Arrays, Slot
from flwr_regs.wire import keys

Precision = torch.dtype | None
"""Of the check; None: the model's own."""
TOLERANCES = {torch.float64: 1e-4, None: 5e-2}
"""The precision of the check -> what rounding may change, of the norm of the update. Where the model does
not run in float64, its own precision is taken, in which a small gradient may have any sign."""
DRAWS = (
    *("rand", "normal", "uniform", "bernoulli", "multinomial", "poisson", "binomial"),
    *("exponential", "geometric", "cauchy", "gamma", "dirichlet", "gumbel", "rrelu"),
)
"""Parts of the names of torch's functions that draw random numbers, beside dropout."""


class Quiet(TorchFunctionMode):
    """In its block dropout is off, and any other draw gives the same numbers each time.

    So a stack whose members draw the same numbers can be compared with a client alone.

    Attributes
    ----------
    seeds : set of int
        Of the generators that were drawn from.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.seeds = set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the function returns."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0]
        if "attention" in name:
            args = tuple(0.0 if type(a) is float else a for a in args)  # their dropout
            kwargs = {k: 0.0 if k == "dropout_p" else v for k, v in kwargs.items()}
        if not any(part in name for part in DRAWS):
            return func(*args, **kwargs)
        generator = kwargs.pop("generator", None) or torch.default_generator
        self.seeds.add(generator.initial_seed())
        if name == "bernoulli" and len(args) == 1:  # under vmap not the same for all
            return (args[0] > 0.5).to(args[0].dtype)
        with seeded(0, self._device):
            return func(*args, **kwargs)


@dataclass(frozen=True)
class Drawn:
    """A client's data in another precision; what they draw is not `Quiet`."""

    source: Batches
    precision: Precision

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        with torch._C.DisableTorchFunction():
            batches = iter(self.source)
            batch = next(batches, None)
        while batch is not None:
            yield _in(self.precision, batch)
            with torch._C.DisableTorchFunction():
                batch = next(batches, None)


def difference(group: Group) -> str:
    """Return where a stack's result is not that of its clients alone, and by how much; "" if nowhere.

    Two clients, as unlike in steps and batches as there are, train in a stack of their own, and each of
    them alone, from the same seed and state, in float64 if the model can. Random numbers beside those of
    the data are the same for both, and dropout is off. A draw by a fixed seed is a difference as well: in a
    stack, each client would get other numbers.

    torch's, numpy's and Python's random states, the models and the clients' states stay as they are.
    """
    first, *others = group.members
    steps, forms = (len(first.plan), first.planned_steps), first.plan.forms

    def unlike(c: Member) -> tuple[bool, bool]:
        return (len(c.plan), c.planned_steps) != steps, c.plan.forms != forms

    pair = sorted((first, max(others, key=unlike)), key=lambda m: -len(m.plan))
    seeds = {m.asked.message.config[keys.SEED_KEY] for m in pair}
    for precision, tolerance in TOLERANCES.items():
        together, alone = Quiet(group.view.device), Quiet(group.view.device)
        with undisturbed(group.view.device):
            try:
                result = _stacked(group, pair, precision, together)
                for row, member in enumerate(pair):
                    parts = result.state, result.upload, result.client
                    actual = _entries(*mapped(parts, itemgetter(row)))
                    expected = _alone(group, member, precision, alone)
                    if where := _compared(actual, *expected, tolerance):
                        return where
                if fixed := together.seeds & alone.seeds - seeds:
                    return f"what it draws by the seed {min(fixed)} differs"
                break
            except Exception:  # whatever torch or the user's code raises in another precision
                if precision is None:
                    raise
    return ""


def _stacked(group: Group, pair: list[Member], precision: Precision, quiet: Quiet) -> StackedResult:
    """Train two clients in a stack."""
    entries, broadcast = _in(precision, (group.view.entries, group.view.broadcast))
    how = {"entries": entries, "broadcast": broadcast, "precision": None, "randomness": "same"}
    view = replace(group.view, **how)
    with restored(view.model), quiet:
        view.model.to(precision)
        return group.run(Stack(view, [_member(c, precision) for c in pair]))


def _member(member: Member, precision: Precision) -> Member:
    """Return a member in another precision."""
    plan = member.plan
    batches = [_in(precision, plan.batch(step)) for step in range(len(plan))]
    data = replace(plan.data, source=Drawn(plan.data.source, precision))
    plan, private = plan_of(data, plan.after, batches), _in(precision, member.private)
    told: Member = _told(member, precision)
    return replace(told, plan=plan, private=private)


def _told(member: Any, precision: Precision) -> Any:
    """Return a client in a round, in a stack or alone, with what it is told in another precision."""
    begun = replace(member.begun, slots=_in(precision, member.begun.slots))
    return replace(member, broadcast=_in(precision, member.broadcast), begun=begun)


def _alone(group: Group, c: Member, precision: Precision, quiet: Quiet) -> tuple[Arrays, Arrays]:
    """Train a client alone, and return (all its entries, its update); its model stays as it is."""
    client, message = c.asked.client, c.asked.message
    model, over_data = client.model, measures(client)
    over_data.data = replace(over_data.data, source=Drawn(client.train_data, precision))
    seed, both = message.config[keys.SEED_KEY], (model, client.task.loss_fn)
    with restored(*both), seeded(seed, over_data.device), quiet:
        member = begin(message, c.asked.memory, model, client.identity)
        model.to(precision)
        _use(model, group, _in(precision, c.plan.batch(0)))
        member = _told(member, precision)
        if member.probing:
            return _entries({}, *first_exchange(member, over_data)), {}
        result = trained(member, client, over_data)
    return _entries(result.state, result.upload, result.client), result.delta


def _use(model: nn.Module, group: Group, batch: Any) -> None:
    """Run a forward pass and the loss: what counts its calls then gives others. The entries stay."""
    plain, device, task = uncompiled(model).train(), group.view.device, group.view.task
    named = (*plain.named_parameters(), *plain.named_buffers())
    entries = {n: t.detach().to(device, copy=True) for n, t in named}
    inputs, targets = to_device(batch, device)
    with torch.no_grad():
        task.loss(task.output(plain, inputs, targets, entries), targets)


def _in(precision: Precision, tree: Any) -> Any:
    """Return nested values with all floating tensors in a precision; None: as they are."""
    return mapped(tree, lambda t: t.to(precision) if precision and t.is_floating_point() else t)


def _entries(state: Arrays, *slots: Slot) -> Arrays:
    """Return the entries of a model, and of slots by ``<term>.<key>``."""
    each = [(t, slot) for some in slots for t, slot in some.items()]
    of_slots = {f"{t}.{k}": a for t, slot in each for k, a in slot.items()}
    return {**state, **{key: torch.as_tensor(a, device="cpu") for key, a in of_slots.items()}}


def _compared(stacked: Arrays, alone: Arrays, delta: Arrays, tolerance: float) -> str:
    """Return the first entry that differs, and by how much; "" if all are equal up to rounding.

    Of an entry that is rounding alone, as the gradient of a bias before BatchNorm, nothing is asked: it is
    measured against the whole update.
    """
    moves = [torch.as_tensor(d, device="cpu").double() for d in delta.values()]
    update = sum(float(move.square().sum()) for move in moves) ** 0.5
    for name in [n for n in alone if n in stacked]:
        expected, value = alone[name], stacked[name]
        if not expected.is_floating_point():
            if value.dtype != expected.dtype or not torch.equal(value, expected):
                return f"'{name}' differs"
            continue
        off = (value.double() - expected.double()).nan_to_num().norm().item()
        size = expected.double().nan_to_num().norm().item()
        scale = update if name in delta else size
        noise = 8 * torch.finfo(expected.dtype).eps * size + 1e-12
        if off > tolerance * (scale + 1e-3 * update) + noise:
            part = "update" if name in delta else "entry"
            return f"'{name}' differs by {off / max(scale, 1e-300):.2g} of the {part}'s norm"
    return ""
