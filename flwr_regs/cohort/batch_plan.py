"""The batches of a client's local steps, drawn ahead as the client's own loop would draw them. Plain torch.

A `DataLoader` over a plain `TensorDataset` is not iterated: its order is drawn, its tensors are indexed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data._utils.collate import default_collate, default_convert

from flwr_regs.client.train.batches import (
    Pairs,
    batch_size,
    count_examples,
    cycle,
    mapped,
    tensors,
    to_device,
)

GATHERED = 2**28
"""Bytes of a round's examples that are put together for a stack."""


class CannotStack(Exception):
    """Why a client cannot train as one of a stack; it then trains by itself."""


@dataclass(eq=False)
class Order:
    """How a plain loader over tensors goes through its examples.

    Attributes
    ----------
    source : sequence of Tensor
        Inputs and targets of the whole data set.
    size : int
        Of a batch.
    drop_last, shuffle : bool
    """

    source: tuple[Tensor, ...]
    size: int
    drop_last: bool
    shuffle: bool

    def __post_init__(self) -> None:
        self.examples = len(self.source[0])
        self.kind = tuple((t.shape[1:], t.dtype) for t in self.source)
        whole, rest = divmod(self.examples, self.size)
        self._pass = (self.size,) * whole + (rest,) * (rest > 0 and not self.drop_last)

    @property
    def batches(self) -> int:
        """The number of batches of a pass."""
        return len(self._pass)

    @cached_property
    def place(self) -> tuple[Any, int]:
        """The larger tensors of which the source's are parts, to be compared, and the first row in them."""
        places, firsts = [], set()
        for t in self.source:
            width = t.stride(0)
            if width < 1 or t.storage_offset() % width:
                return id(self), 0
            firsts.add(t.storage_offset() // width)
            places.append((t.untyped_storage().data_ptr(), t.stride()))
        return (tuple(places), int(firsts.pop())) if len(firsts) == 1 else (id(self), 0)

    def draw(self, generator: torch.Generator, steps: int) -> tuple[Tensor, tuple[int, ...]]:
        """Return the rows of the next steps, and the steps' sizes, drawn as a loader draws them."""
        number = torch.empty((), dtype=torch.int64)
        passes: list[Tensor] = []
        for _ in range(-(-steps // max(self.batches, 1)) if self.batches else 0):
            number.random_(generator=generator)  # the seed of its workers
            if self.shuffle:
                shuffling = torch.Generator().manual_seed(int(number.random_(generator=generator)))
                passes.append(torch.randperm(self.examples, generator=shuffling))
            else:
                passes.append(torch.arange(self.examples))
        if not passes:
            return torch.arange(0), ()
        if len(passes) == 1 and steps == self.batches and sum(self._pass) == self.examples:
            return passes[0], self._pass
        sizes = (self._pass * len(passes))[:steps]
        rows = torch.cat([rows[: sum(self._pass)] for rows in passes])
        return rows[: sum(sizes)], sizes


@dataclass(eq=False)
class Plan:
    """The batches of one client's round.

    Attributes
    ----------
    data : Pairs
    seed : int
        Of torch's random generator, from which they are drawn.
    order : Order or None
        How the loader goes through its examples; None if `batches` are drawn.
    rows : Tensor or None
        The rows of an order's source of all steps, one after the other.
    sizes : sequence of int
        How many of the rows are each step's.
    batches : sequence of (inputs, targets)
    drawn : Tensor or None
        The state of torch's random generator behind all `batches`.
    """

    data: Pairs
    seed: int
    order: Order | None = None
    rows: Tensor | None = None
    sizes: tuple[int, ...] = ()
    batches: tuple[tuple[Any, Any], ...] = ()
    drawn: Tensor | None = None

    def __len__(self) -> int:
        return len(self.forms)

    def batch(self, step: int) -> tuple[Any, Any]:
        """Return the inputs and targets of a step."""
        if self.order is None or self.rows is None:
            return self.batches[step]
        first = sum(self.sizes[:step])
        rows = self.rows[first : first + self.sizes[step]]
        inputs, targets = (t.index_select(0, rows) for t in self.order.source)
        return inputs, targets

    @cached_property
    def forms(self) -> tuple[Any, ...]:
        """What two batches share that can be stacked, for each step: structure, shapes, dtypes."""
        return tuple(map(_form, self.batches)) if self.order is None else self.sizes

    @property
    def kind(self) -> Any:
        """What the batches of two plans share that can be in one stack."""
        return "drawn" if self.order is None else self.order.kind

    def size(self, step: int) -> int:
        """Return the number of examples of a step."""
        return batch_size(self.batches[step][1]) if self.order is None else self.sizes[step]

    @property
    def after(self) -> Tensor:
        """The state of torch's random generator behind all that the loader drew."""
        if self.drawn is not None or self.order is None:
            return self.drawn if self.drawn is not None else torch.get_rng_state()
        generator = torch.Generator().manual_seed(self.seed)
        self.order.draw(generator, len(self))
        return generator.get_state()

    def one_pass(self) -> Plan:
        """Return the batches of one pass over the data, as it yields them behind the round's steps."""
        if self.order is None:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.after)
                return replace(self, batches=tuple(self.data))
        generator = torch.Generator()
        generator.set_state(self.after)
        rows, sizes = self.order.draw(generator, self.order.batches)
        return replace(self, rows=rows, sizes=sizes)

    def again(self, device: torch.device, steps: int) -> Iterator[tuple[Any, Any]]:
        """Yield `steps` batches on a device, those of the plan first."""
        plan = self if steps <= len(self) else draw(self.data, self.seed, steps)
        return (to_device(plan.batch(step), device) for step in range(steps))

    @property
    def trained(self) -> int:
        """The number of examples of all steps."""
        return sum(map(self.size, range(len(self)))) if self.order is None else sum(self.sizes)

    @property
    def examples(self) -> int:
        """``n_k``, the size of the client's data set."""
        return count_examples(self.data) if self.order is None else self.order.examples

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

    @property
    def form(self) -> Any:
        """The shapes of its tensors."""
        return [t.shape for t in self.leaves]

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


class Batches:
    """The batches of a stack's steps.

    Of plans of rows, the rows of all members are in one table, and a step's are gathered at once: from the
    tensor of which all the members' are parts, or else from one that is put together here.

    Parameters
    ----------
    plans : sequence of Plan
        The members', in their order.
    device : torch.device
    """

    def __init__(self, plans: Sequence[Plan], device: torch.device) -> None:
        self._plans, self._device = plans, device
        self._base: list[Tensor] = []
        self.form: Any = None
        """The shapes of the first step's batches."""
        self.equal = False
        """Whether all have batches of rows, and as many in each step."""
        orders = [p.order for p in plans if p.order is not None]
        rows = [p.rows for p in plans if p.rows is not None]
        if len(rows) < len(plans):
            return
        table = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        if len({order.place[0] for order in orders}) == 1:
            firsts = [order.place[1] for order in orders]
            end = max(first + o.examples for first, o in zip(firsts, orders, strict=True))
            self._base = [
                t.as_strided((end, *t.shape[1:]), t.stride(), 0) for t in orders[0].source
            ]
            table = table + torch.tensor(firsts).unsqueeze(1)
        elif sum(_row_bytes(p) * len(r) for p, r in zip(plans, rows, strict=True)) <= GATHERED:
            parts = [
                [t.index_select(0, r) for t in o.source] for o, r in zip(orders, rows, strict=True)
            ]
            self._base = [torch.cat(leaf) for leaf in zip(*parts, strict=True)]
            firsts = [0, *itertools.accumulate(map(len, rows))][:-1]
            table = torch.tensor(firsts).unsqueeze(1) + torch.arange(table.shape[1])
        else:
            return
        self._table = table.to(self._base[0].device)
        self.equal = all(p.sizes == plans[0].sizes for p in plans)

    def of(self, step: int, members: Sequence[int]) -> Batch:
        """Return the batches that some members have in a step, which are of one form."""
        batch = self._of(step, members)
        self.form = self.form or batch.form
        return batch

    def _of(self, step: int, members: Sequence[int]) -> Batch:
        if not self._base:
            return stacked([self._plans[k] for k in members], step, self._device)
        first, size = sum(self._plans[members[0]].sizes[:step]), self._plans[members[0]].sizes[step]
        if self.equal:  # then the members are all that there are
            rows = self._table[:, first : first + size]
        else:
            firsts = [sum(self._plans[k].sizes[:step]) for k in members]
            at = torch.tensor(firsts).unsqueeze(1) + torch.arange(size)
            rows = self._table[torch.tensor(members).unsqueeze(1), at]
        leaves = [
            t.index_select(0, rows.reshape(-1)).view(*rows.shape, *t.shape[1:]).to(self._device)
            for t in self._base
        ]
        return Batch(tuple(leaves), leaves)


def _row_bytes(plan: Plan) -> int:
    assert plan.order is not None
    return sum(t.nbytes // max(len(t), 1) for t in plan.order.source)


def draw(data: Pairs, seed: int, steps: int) -> Plan:
    """Return the batches of a round of `steps`, as they come with torch's generator at `seed`.

    The process's random state does not change. Raises CannotStack for a loader with a random generator of
    its own, or with worker processes: their draws cannot be taken back.
    """
    if (order := order_of(data)) is not None:
        rows, sizes = order.draw(torch.Generator().manual_seed(seed), steps)
        return Plan(data, seed, order, rows, sizes)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        batches = tuple(itertools.islice(cycle(data), steps))
        return Plan(data, seed, batches=batches, drawn=torch.default_generator.get_state())


_ORDERS: WeakKeyDictionary[Any, Order | None] = WeakKeyDictionary()


def order_of(data: Pairs) -> Order | None:
    """Return the order of a plain loader of pairs of tensors; None for any other data.

    Raises what :func:`draw` raises.
    """
    loader: Any = data.source
    if not isinstance(loader, DataLoader):
        return None
    if loader not in _ORDERS:
        _ORDERS[loader] = _read(loader)
    order = _ORDERS[loader]
    if order is not None and order.source is not loader.dataset.tensors:  # type: ignore[attr-defined]
        order = _ORDERS[loader] = _read(loader)
    return order


def _read(loader: DataLoader[Any]) -> Order | None:
    if loader.generator is not None or _own_generator(loader):
        raise CannotStack("its loader has a random generator of its own")
    if loader.num_workers:
        raise CannotStack("its loader has worker processes")
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
    return Order(dataset.tensors, batches.batch_size, batches.drop_last, shuffle)


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
