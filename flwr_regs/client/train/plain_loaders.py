"""Plain loaders over tensors, which are not iterated: their order is drawn, their tensors are indexed.

That gives the batches that torch's `DataLoader` gives, from the same draws, in a part of its time: for a
client alone batch by batch, for a stack of clients all at once. Plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import data
from torch.utils.data._utils.collate import default_collate, default_convert


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
        self.length = len(self.source[0])
        whole, rest = divmod(self.length, self.size)
        self.sizes = (self.size,) * whole + (rest,) * (rest > 0 and not self.drop_last)
        self.kind = tuple((t.shape[1:], t.dtype) for t in self.source)

    def draw(self, generator: torch.Generator, passes: int) -> Tensor:
        """Return the rows of some passes, drawn as a loader draws them."""
        # on the CPU, whatever the user's default device is
        number, shuffling = torch.empty((), dtype=torch.int64, device="cpu"), torch.Generator("cpu")
        used, rows = sum(self.sizes), list[Tensor]()
        for _ in range(passes):
            number.random_(generator=generator)  # the seed of its workers
            if self.shuffle:
                shuffling.manual_seed(int(number.random_(generator=generator)))
                order = torch.randperm(self.length, generator=shuffling, device="cpu")
                rows.append(order if used == self.length else order[:used])
            else:
                rows.append(torch.arange(used, device="cpu"))
        return rows[0] if passes == 1 else torch.cat([torch.arange(0, device="cpu"), *rows])

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of some rows."""
        inputs, targets = (t.index_select(0, rows.to(t.device)) for t in self.source)
        return inputs, targets

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of one pass, as torch's generator draws them now."""
        rows = self.draw(torch.default_generator, 1)
        return map(self.batch, torch.split(rows, list(self.sizes)))


def order_of(loader: Any) -> Order | None:
    """Return the order of a plain loader of pairs of tensors; None for any other data."""
    if not isinstance(loader, data.DataLoader):
        return None
    batches: Any = loader.batch_sampler
    whole = default_collate
    if batches is None:  # its sampler makes the batches, and each is one indexing
        batches, whole = loader.sampler, default_convert
    sampler: Any = getattr(batches, "sampler", None)
    dataset: Any = loader.dataset
    shuffle = type(sampler) is data.RandomSampler
    kinds = data.DataLoader, data.TensorDataset, data.BatchSampler
    plain = (
        (type(loader), type(dataset), type(batches)) == kinds
        and (shuffle or type(sampler) is data.SequentialSampler)
        and len(dataset.tensors) == 2
        and all(t.layout is torch.strided and not t.is_nested for t in dataset.tensors)
        and loader.collate_fn is whole
        and not (loader.num_workers or loader.pin_memory or getattr(sampler, "replacement", False))
        and not has_generator(loader)
        and sampler.data_source is dataset
        and len(sampler) == len(dataset)
    )
    if not plain:
        return None
    return Order(dataset.tensors, batches.batch_size, batches.drop_last, shuffle)


def has_generator(loader: Any) -> bool:
    """Whether a loader, or one of its samplers, has a random generator of its own."""
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    places = loader, loader.sampler, getattr(batches, "sampler", None)
    return any(getattr(place, "generator", None) is not None for place in places)
