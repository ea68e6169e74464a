"""The batches of a client's local steps, drawn ahead as its own loop would draw them. Plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flwr_regs.client.train.batches import Pairs, batch_size, cycle, flat, forked, mapped, tensors
from flwr_regs.client.train.plain_loaders import Order, has_generator

DATA = 2**26
"""Bytes of clients' whole data that go through a model at once."""
GATHERED = 2**28
"""Bytes of a round's examples that are put together for a stack."""


class CannotStack(Exception):
    """Why a client cannot train as one of a stack; it then trains by itself."""


@dataclass(eq=False)
class Plan:
    """The batches of one client's round.

    Attributes
    ----------
    data : Pairs
    after : torch.Generator
        In the state in which all that is drawn leaves it.
    sizes, forms : sequence
        For each step, the number of examples, and what two batches share that can be stacked.
    order : Order or None
        How the loader goes through its examples; None if `batches` are drawn.
    rows : Tensor or None
        The rows of an order's source of all steps, one after the other.
    batches : sequence of (inputs, targets)
    kind : hashable
        What the batches of two plans share that can be in one stack.
    """

    data: Pairs
    after: torch.Generator
    sizes: tuple[int, ...]
    forms: tuple[Any, ...]
    order: Order | None = None
    rows: Tensor | None = None
    batches: Sequence[tuple[Any, Any]] = ()
    kind: Any = "drawn"

    def __len__(self) -> int:
        return len(self.sizes)

    def batch(self, step: int) -> tuple[Any, Any]:
        """Return the inputs and targets of a step."""
        if self.order is None or self.rows is None:
            return self.batches[step]
        first = sum(self.sizes[:step])
        return self.order.batch(self.rows[first : first + self.sizes[step]])

    def one_pass(self) -> Plan:
        """Return the batches of one pass over the data, as it yields them behind the round's steps."""
        return draw(self.data, self.after.clone_state(), self.order)

    @property
    def nbytes(self) -> int:
        """The memory that the drawn batches hold, beside the data set itself."""
        drawn = tensors(self.batches) if self.rows is None else [self.rows]
        return sum(t.nbytes for t in drawn)


def plan_of(data: Pairs, after: torch.Generator, batches: Sequence[Any]) -> Plan:
    """Return the plan of batches that are drawn already."""
    sizes = tuple(batch_size(targets) for _, targets in batches)
    return Plan(data, after, sizes, tuple(map(_form, batches)), batches=batches)


def draw(
    data: Pairs, generator: torch.Generator, order: Order | None, steps: int | None = None
) -> Plan:
    """Return the batches of some steps, or of one pass, as they come with torch's generator in this state.

    The process's random state does not change.
    """
    if order is not None:
        steps = len(order.sizes) if steps is None else steps
        passes = -(-steps // len(order.sizes)) if order.sizes else 0
        sizes = (order.sizes * passes)[:steps]
        rows = order.draw(generator, passes)[: sum(sizes)]
        return Plan(data, generator, sizes, sizes, order, rows, kind=order.kind)
    with forked():
        torch.set_rng_state(generator.get_state())
        batches = list(data if steps is None else itertools.islice(cycle(data), steps))
        generator.set_state(torch.get_rng_state())
    return plan_of(data, generator, batches)


@dataclass(frozen=True)
class Batch:
    """A stacked batch: its tensors, and how one client's is put together of them."""

    like: Any
    leaves: list[Tensor]

    def rebuilt(self, leaves: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return inputs and targets of these tensors."""
        given = iter(leaves)
        return mapped(self.like, lambda _: next(given))  # type: ignore[no-any-return]


class Batches:
    """The batches of a stack's steps; the examples of all members' rows are put together before.

    Parameters
    ----------
    plans : sequence of Plan
        The members', in their order.
    device : torch.device

    Attributes
    ----------
    alike : bool
        Whether the batches of all members have one form in each step; then all take all steps.
    """

    def __init__(self, plans: Sequence[Plan], device: torch.device) -> None:
        self._plans, self._device = plans, device
        self._leaves: list[Tensor] = []
        self.alike = len({p.forms for p in plans}) == 1
        given = [(p.order.source, p.rows) for p in plans if p.order and p.rows is not None]
        self._firsts = [0, *itertools.accumulate(len(rows) for _, rows in given)]
        nbytes = sum(t[:1].nbytes for t in given[0][0]) * self._firsts[-1] if given else 0
        if len(given) == len(plans) and nbytes <= GATHERED:
            for k, first in enumerate(given[0][0]):
                leaf = first.new_empty(self._firsts[-1], *first.shape[1:])
                parts = leaf.split_with_sizes([len(rows) for _, rows in given])
                for (source, rows), part in zip(given, parts, strict=True):
                    torch.index_select(source[k], 0, rows.to(part.device), out=part)
                self._leaves.append(leaf.to(device))

    def of(self, step: int, members: Sequence[int]) -> Batch:
        """Return the batches that some members have in a step, which are of one form."""
        plans = [self._plans[k] for k in members]
        first, size = sum(plans[0].sizes[:step]), plans[0].sizes[step]
        if self._leaves and self.alike:
            shape = len(plans), sum(plans[0].sizes)
            leaves = [t.view(*shape, *t.shape[1:]).narrow(1, first, size) for t in self._leaves]
            return Batch(tuple(leaves), leaves)
        if not self._leaves:
            each = [plan.batch(step) for plan in plans]
            parts = zip(*map(tensors, each), strict=True)
            return Batch(each[0], [torch.stack(leaf).to(self._device) for leaf in parts])
        firsts = [self._firsts[k] + sum(self._plans[k].sizes[:step]) for k in members]
        rows = torch.tensor(firsts, device="cpu").unsqueeze(1) + torch.arange(size, device="cpu")
        index = rows.flatten().to(self._device)
        leaves = [t.index_select(0, index).view(*rows.shape, *t.shape[1:]) for t in self._leaves]
        return Batch(tuple(leaves), leaves)


def together(plans: Sequence[Plan], device: torch.device) -> Iterator[tuple[Any, list[Batch]]]:
    """Yield (places of plans with batches of one form, their batches stacked), up to `DATA` at once."""
    alike: dict[Any, list[int]] = {}
    for place, plan in enumerate(plans):
        alike.setdefault((plan.kind, plan.forms), []).append(place)
    for places in alike.values():
        first = plans[places[0]]
        size = sum(t.nbytes for i in range(len(first)) for t in tensors(first.batch(i)))
        most = max(DATA // max(size, 1), 1)
        for some in (places[i : i + most] for i in range(0, len(places), most)):
            batches = Batches([plans[place] for place in some], device)
            yield some, [batches.of(i, range(len(some))) for i in range(len(first))]


def order_of(data: Pairs) -> Order | None:
    """Return the order of a plain loader of pairs of tensors; None for any other data.

    Raises CannotStack for a loader with a random generator of its own, or with worker processes: their
    draws cannot be taken back.
    """
    loader, order = data.source, data.order
    if order is None and isinstance(loader, torch.utils.data.DataLoader):
        if has_generator(loader):
            raise CannotStack("its loader has a random generator of its own")
        if loader.num_workers:
            raise CannotStack("its loader has worker processes")
    return order


def _form(batch: Any) -> Any:
    """Return the shapes and dtypes of a batch's tensors, as they are nested, and what else it holds.

    Raises CannotStack if that is more than plain values: a stack has the first client's, and whether others
    are equal is not known.
    """
    plain = Tensor | int | float | str | bytes | None
    if odd := [leaf for leaf in flat(batch) if not isinstance(leaf, plain)]:
        raise CannotStack(f"its batches hold a {type(odd[0]).__name__}")
    place: Any = ...
    return (repr(mapped(batch, lambda _: place)), *((t.shape, t.dtype) for t in tensors(batch)))


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of torch's random generators, that of the CPU first."""
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]
