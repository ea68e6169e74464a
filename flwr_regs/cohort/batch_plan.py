"""The batches of a client's local steps, drawn ahead as the client's own loop would draw them. Plain torch.

A `DataLoader` over a plain `TensorDataset` is not iterated: its order is drawn, its tensors are indexed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data._utils.collate import default_collate, default_convert

from flwr_regs.client.train.batches import Pairs, batch_size, cycle, mapped, tensors, to_device


class CannotStack(Exception):
    """Why a client cannot train as one of a stack; it then trains by itself."""


@dataclass(frozen=True)
class Plan:
    """The batches of one client's round.

    Attributes
    ----------
    after : Tensor
        The state of torch's random generator behind all that the loader drew.
    rows : Tensor or None
        The rows of `source` of all steps, one after the other; None if `batches` are drawn.
    sizes : sequence of int
        How many of the rows are each step's.
    source : sequence of Tensor
        Inputs and targets of the whole data set.
    batches : sequence of (inputs, targets)
    """

    data: Pairs
    seed: int
    after: Tensor
    rows: Tensor | None = None
    sizes: tuple[int, ...] = ()
    source: tuple[Tensor, ...] = ()
    batches: tuple[tuple[Any, Any], ...] = ()

    def __len__(self) -> int:
        return len(self.forms)

    def batch(self, step: int) -> tuple[Any, Any]:
        """Return the inputs and targets of a step."""
        if self.rows is None:
            return self.batches[step]
        first = sum(self.sizes[:step])
        rows = self.rows[first : first + self.sizes[step]]
        inputs, targets = (t.index_select(0, rows) for t in self.source)
        return inputs, targets

    @cached_property
    def forms(self) -> tuple[Any, ...]:
        """What two batches share that can be stacked, for each step: structure, shapes, dtypes."""
        return tuple(map(_form, self.batches)) if self.rows is None else self.sizes

    @property
    def kind(self) -> Any:
        """What the batches of two plans share that can be in one stack."""
        if self.rows is None:
            return "drawn"
        return tuple((t.shape[1:], t.dtype) for t in self.source)

    def size(self, step: int) -> int:
        """Return the number of examples of a step."""
        return batch_size(self.batches[step][1]) if self.rows is None else self.sizes[step]

    def one_pass(self) -> Plan:
        """Return the batches of one pass over the data, as it yields them behind the round's steps."""
        loader: Any = self.data.source
        if self.rows is None:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.after)
                return replace(self, batches=tuple(self.data))
        order = _order_of(loader)
        assert order is not None
        generator = torch.Generator()
        generator.set_state(self.after)
        rows, sizes = _drawn(order, generator, len(loader))
        return replace(self, rows=rows, sizes=sizes)

    def again(self, device: torch.device, steps: int) -> Iterator[tuple[Any, Any]]:
        """Yield `steps` batches on a device, those of the plan first."""
        plan = self if steps <= len(self) else draw(self.data, self.seed, steps)
        return (to_device(plan.batch(step), device) for step in range(steps))

    @property
    def trained(self) -> int:
        """The number of examples of all steps."""
        return sum(map(self.size, range(len(self))))

    @property
    def nbytes(self) -> int:
        """The memory that the drawn batches hold, beside the data set itself."""
        return (
            sum(t.nbytes for t in tensors(self.batches)) if self.rows is None else self.rows.nbytes
        )


@dataclass(frozen=True)
class Batch:
    """A stacked batch: its tensors, and how one client's is put together of them."""

    like: Any
    leaves: list[Tensor]

    def rebuilt(self, leaves: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return inputs and targets of these tensors."""
        tensors_ = iter(leaves)
        inputs, targets = (mapped(part, lambda _: next(tensors_)) for part in self.like)
        return inputs, targets


def stacked(plans: Sequence[Plan], step: int, device: torch.device) -> Batch:
    """Return a step's batches of some plans as one, each tensor over the plans first."""
    each = [plan.batch(step) for plan in plans]
    leaves = [torch.stack(parts) for parts in zip(*map(tensors, each), strict=True)]
    return Batch(each[0], [t.to(device) for t in leaves])


def draw(data: Pairs, seed: int, steps: int, indexed: bool = True) -> Plan:
    """Return the batches of a round of `steps`, as they come with torch's generator at `seed`.

    The process's random state does not change. Not `indexed`: every loader is iterated. Raises CannotStack
    for a loader with a random generator of its own, or with worker processes: their draws cannot be taken
    back.
    """
    loader = data.source
    if isinstance(loader, DataLoader):
        if loader.generator is not None or _own_generator(loader):
            raise CannotStack("its loader has a random generator of its own")
        if loader.num_workers:
            raise CannotStack("its loader has worker processes")
        if indexed and (order := _order_of(loader)) is not None:
            generator = torch.Generator().manual_seed(seed)
            rows, sizes = _drawn(order, generator, steps)
            dataset: Any = loader.dataset
            return Plan(data, seed, generator.get_state(), rows, sizes, dataset.tensors)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        batches = tuple(itertools.islice(cycle(data), steps))
        return Plan(data, seed, torch.default_generator.get_state(), batches=batches)


@dataclass(frozen=True)
class _Order:
    """How a plain loader goes through its examples."""

    examples: int
    size: int
    drop_last: bool
    shuffle: bool


def _order_of(loader: DataLoader[Any]) -> _Order | None:
    """Return the order of a plain loader of pairs of tensors; None for any other."""
    batches: Any
    if loader.batch_sampler is None:  # its sampler makes the batches, and each is one indexing
        batches, whole = loader.sampler, default_convert
    else:
        batches, whole = loader.batch_sampler, default_collate
    dataset: Any = loader.dataset
    sampler: Any = getattr(batches, "sampler", None)
    plain = (
        type(loader) is DataLoader
        and type(dataset) is TensorDataset
        and len(dataset.tensors) == 2
        and type(batches) is BatchSampler
        and loader.collate_fn is whole
        and not loader.pin_memory
    )
    if not plain:
        return None
    n = len(dataset)
    shuffle = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == n
    in_order = type(sampler) is SequentialSampler and len(sampler) == n
    if (not shuffle and not in_order) or sampler.data_source is not dataset:
        return None
    return _Order(n, batches.batch_size, batches.drop_last, shuffle)


def _drawn(order: _Order, generator: torch.Generator, steps: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the rows of the next steps, and the steps' sizes, drawn from `generator` as a loader draws."""
    full = order.examples - order.examples % order.size if order.drop_last else order.examples
    number = torch.empty((), dtype=torch.int64)
    passes: list[Tensor] = []
    sizes: list[int] = []
    while full and len(sizes) < steps:
        number.random_(generator=generator)  # the seed of its workers
        if order.shuffle:
            shuffling = torch.Generator().manual_seed(int(number.random_(generator=generator)))
            rows = torch.randperm(order.examples, generator=shuffling)
        else:
            rows = torch.arange(order.examples)
        passes.append(rows[:full])
        sizes += [min(order.size, full - i) for i in range(0, full, order.size)]
    rows = passes[0] if len(passes) == 1 else torch.cat([torch.arange(0), *passes])
    return rows[: sum(sizes[:steps])], tuple(sizes[:steps])


def _own_generator(loader: DataLoader[Any]) -> bool:
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return any(getattr(s, "generator", None) is not None for s in (sampler, inner))


def _form(batch: Any) -> Any:
    """Return the shapes and dtypes of a batch, nested as it is.

    Raises CannotStack for a batch that holds more than tensors and plain values: a stack has the first
    client's, and whether others are equal is not known.
    """
    nested = mapped(batch, lambda _: torch.empty(0))
    if odd := _odd(nested):
        raise CannotStack(f"its batches hold a {odd}")
    return (repr(nested), *((t.shape, t.dtype) for t in tensors(batch)))


def _odd(value: Any) -> str:
    """Return the type of something in a nested value that is not plain; "" if all is."""
    if isinstance(value, dict | list | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(_odd, parts)), "")
    plain = value is None or isinstance(value, Tensor | int | float | str | bytes)
    return "" if plain else type(value).__name__
