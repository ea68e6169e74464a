"""A client's data: its batches as pairs, their number and size, and the device. Plain torch.

`Replay` draws the batches of a client's steps a second time in the same order.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from flwr_regs.client.train.plain_loaders import Order, order_of

Batches = Iterable[Any]
"""Batches, such as a DataLoader: pairs of (inputs, targets), or mappings with an entry for the targets."""

TARGET_KEYS = ("label", "labels", "target", "targets", "y", "fine_label", "coarse_label")
"""The usual keys of the targets in a batch that is a mapping."""

NO_DATA = (
    "the client has no training data: train_data holds no batch of (inputs, targets) "
    "(an empty partition, or drop_last=True with fewer examples than one batch)"
)


AGAIN = "expected batches that can be iterated again and again, such as a DataLoader or a list"

CPU = torch.device("cpu")
DRAWING = threading.RLock()
"""torch's random generators are the process's: threads would draw other numbers each time."""


class Keywords(dict[str, Any]):
    """Inputs that go into the model as keywords; `target` is the key that the targets had beside them."""

    def __init__(self, inputs: Mapping[str, Any], target: str) -> None:
        super().__init__(inputs)
        self.target = target


@dataclass(frozen=True)
class Pairs:
    """Any data as pairs of (inputs, targets). This is the only place that reads a batch's layout.

    A pair stays as it is. Of a mapping, the entry `target_key` holds the targets. Without `target_key` it
    is the only one of `TARGET_KEYS`; with it, the others of them are other targets and are left out. One
    input that is left goes into the model positionally, several as `Keywords`.

    Parameters
    ----------
    source : iterable
        The batches.
    target_key : str, optional
        The key of the targets.
    keywords : bool
        Return a mapping's inputs as `Keywords` even if there is only one.

    Iteration raises TypeError for a batch that is neither a pair nor a mapping, ValueError for a mapping
    without one clear entry for the targets, or without inputs.
    """

    source: Batches
    target_key: str | None = None
    keywords: bool = False

    @property
    def order(self) -> Order | None:
        """How a plain loader goes through its examples; None for any other data."""
        return order_of(self.source)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        order = self.order
        return map(self._pair, self.source) if order is None else order.batches()

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        # in each step: a union would take longer
        if isinstance(batch, (list, tuple)) and len(batch) == 2:
            return batch[0], batch[1]
        if not isinstance(batch, Mapping):
            size = f" of {len(batch)} entries" if isinstance(batch, list | tuple) else ""
            raise TypeError(
                "a batch must be a pair of (inputs, targets), or a mapping with an entry for the targets "
                f"(see target_key=), not a {type(batch).__name__}{size}"
            )
        key = self._key(list(batch))
        others = () if self.target_key is None else TARGET_KEYS
        inputs = {k: v for k, v in batch.items() if k != key and k not in others}
        if not inputs:
            raise ValueError(
                f"a batch with the keys {list(batch)} has no inputs beside its targets, '{key}'"
            )
        if len(inputs) == 1 and not self.keywords:
            return next(iter(inputs.values())), batch[key]
        return Keywords(inputs, key), batch[key]

    def _key(self, batch_keys: list[Any]) -> str:
        """Return the key of the targets among those that were found."""
        names = TARGET_KEYS if self.target_key is None else (self.target_key,)
        candidates = [k for k in names if k in batch_keys]
        if len(candidates) == 1:
            return candidates[0]
        what = f"no entry for its targets, such as {names[0]!r}"
        if self.target_key is not None:
            what = f"no entry target_key='{self.target_key}'"
        elif candidates:
            what = f"several entries that may be its targets: {candidates}"
        batch = f"a batch with the keys {batch_keys}"
        raise ValueError(f"{batch} has {what}; name the one to use with target_key=")


def check_batches(data: Any, name: str) -> None:
    """Raise TypeError unless `data`, the argument `name`, can hold batches and be iterated again and again.

    What is in the batches, and whether there are any, shows when they are read.
    """
    data = data.source if isinstance(data, Pairs) else data
    kind, pairs = type(data).__name__, "expected batches of (inputs, targets), such as"
    size = "batch_size=32, shuffle=True" if name == "train_data" else "batch_size=32"
    if isinstance(data, Iterator):
        why = f"a {kind}, which can be iterated only once: {AGAIN}"
    elif is_dataset(data):
        why = f"a {kind}: expected batches, such as DataLoader({name}, {size})"
    elif isinstance(data, Tensor | np.ndarray):
        why = f"a {kind}: {pairs} DataLoader(TensorDataset(inputs, targets), {size})"
    elif isinstance(data, list | tuple) and data and isinstance(data[0], Tensor | np.ndarray):
        why = f"a {kind} of arrays: {pairs} [(inputs, targets)], or DataLoader(TensorDataset(*{name}))"
    elif isinstance(data, list | tuple) and data and _is_numbers(data[0]):
        why = (
            f"a {kind} of lists of numbers: {pairs} [(torch.tensor(inputs), torch.tensor(targets))]"
        )
    elif isinstance(data, Mapping):
        why = f"a {kind}, which is one batch: expected batches, such as [{name}]"
    elif isinstance(data, str) or {"__iter__", "__getitem__"}.isdisjoint(dir(type(data))):
        why = f"{repr(data)[:60]}: {pairs} DataLoader(dataset, {size})"
    else:
        return
    raise TypeError(f"{name} is {why}")


def _is_numbers(data: Any) -> bool:
    """Whether this is a number, or nested lists that hold nothing else."""
    if isinstance(data, list | tuple):
        return all(map(_is_numbers, data))
    return isinstance(data, Number)


def is_dataset(data: Any) -> bool:
    """Whether `data` holds examples: torch's Dataset, but not a stream, or that of Hugging Face."""
    torchs = torch.utils.data
    of_torch = isinstance(data, torchs.Dataset) and not isinstance(data, torchs.IterableDataset)
    return of_torch or type(data).__module__ == "datasets.arrow_dataset"


def cycle(data: Pairs) -> Iterator[tuple[Any, Any]]:
    """Yield the batches again and again; a shuffling loader reshuffles on each pass.

    Raises ValueError if a pass yields no batch.
    """
    for number in itertools.count(1):
        empty = True
        for batch in data:
            empty = False
            yield batch
        if empty:
            kind = type(data.source).__name__
            why = f"pass {number} over train_data, a {kind}, yields no batch: {AGAIN}"
            raise ValueError(why if number > 1 else NO_DATA)


def count_batches(data: Pairs) -> int:
    """Return the number of batches in one pass over `data`.

    Raises ValueError if there are none.
    """
    try:
        batches = len(data)
    except TypeError:  # also from a DataLoader over an IterableDataset without a length
        batches = sum(1 for _ in data)
    if batches == 0:
        raise ValueError(NO_DATA)
    return batches


def count_examples(data: Pairs) -> int:
    """Return ``n_k``, the size of the local data set, whatever a loader drops.

    It is the length of the loader's sampler, or of the sampler in its batch sampler. Where neither has a
    length, the examples of one pass are counted; torch's random state does not change.
    """
    if isinstance(data.source, torch.utils.data.DataLoader):
        loader = data.source
        batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        examples = getattr(batches, "sampler", None)
        if isinstance(examples, Sized):
            return len(examples)
        streamed = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        if streamed and loader.batch_sampler is not None and isinstance(loader.dataset, Sized):
            return len(loader.dataset)  # without a batch sampler, it counts batches
    with forked():
        return sum(batch_size(targets) for _, targets in data)


def batch_size(targets: Any) -> int:
    """Return the number of examples in a batch: the length of its first tensor, at any depth.

    A list or tuple of alike dicts, or of tensors of different lengths, has an entry for each example.
    Raises TypeError for a tensor without dimensions: it is one example, not a batch.
    """
    leaves = [targets] if type(targets) is Tensor else tensors(targets)
    if type(targets) in (list, tuple):
        keys = {frozenset(one) if isinstance(one, Mapping) else None for one in targets}
        if (len(keys) == 1 and None not in keys) or len({t.shape[:1] for t in leaves}) > 1:
            return len(targets)
    if leaves and leaves[0].ndim == 0:
        raise TypeError(
            "the targets of a batch have no dimension, so it is one example: give the loader a batch_size"
        )
    return len(leaves[0]) if leaves else len(targets)


def resolve_device(device: str | torch.device) -> torch.device:
    """Return `device`; ``"auto"`` means the accelerator if there is one, else the CPU.

    Raises ValueError for what is no device, and for a CUDA device where there is none.
    """
    if device != "auto":
        try:
            asked = torch.device(device)
        except (RuntimeError, TypeError):
            expected = "'auto', or one that torch knows, such as 'cpu' or 'cuda:0'"
            raise ValueError(f"device must be {expected}, not {device!r}") from None
        if asked.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device='{device}': torch finds no CUDA GPU here; give device='auto'")
        return asked
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator or CPU


def to_device(value: Any, device: str | torch.device) -> Any:
    """Move the tensors in nested dicts, lists and tuples; leave anything else unchanged."""
    if type(value) is Tensor:  # as most batches are
        return value.to(device)
    place = torch.device(device)
    return mapped(value, lambda tensor: tensor.to(place))


def on_device(data: Iterable[tuple[Any, Any]], device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Yield batches on the device."""
    for inputs, targets in data:
        yield to_device(inputs, device), to_device(targets, device)


def label_counts(data: Pairs) -> Tensor:
    """Return the number of examples of each class in one pass over `data`: int64, ``(largest label + 1,)``.

    torch's random state does not change; a generator that belongs to the loader advances.
    """
    with forked():
        each = [torch.as_tensor(targets, device="cpu").reshape(-1) for _, targets in data]
    if not each:
        raise ValueError(NO_DATA)
    labels = torch.cat(each)
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"label counts need integer class labels, not {labels.dtype}")
    labels = labels.to(torch.int64)
    if bool((labels < 0).any()):
        raise ValueError(f"label counts need labels from 0 on, but there is {int(labels.min())}")
    return torch.bincount(labels)


def padded(counts: Tensor, classes: int) -> Tensor:
    """Return label counts with an entry for each class of a model's output."""
    return torch.nn.functional.pad(counts, (0, max(classes - len(counts), 0)))


def flat(value: Any) -> list[Any]:
    """Return what nested dicts, lists and tuples hold, in order."""
    if isinstance(value, dict | list | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return [leaf for part in parts for leaf in flat(part)]
    return [value]


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value, in order."""
    return [leaf for leaf in flat(value) if isinstance(leaf, Tensor)]


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with `change` applied to its tensors; anything else in it stays."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        items = {k: mapped(v, change) for k, v in value.items()}
        return Keywords(items, value.target) if isinstance(value, Keywords) else items
    if isinstance(value, list | tuple):
        parts = [mapped(v, change) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


@contextmanager
def forked(device: torch.device = CPU) -> Iterator[None]:
    """Give torch's random generators the states back that they have before the block.

    One thread at a time is in such blocks, which may be nested; others wait. So leave a block in the thread
    that entered it, also where a generator pauses in it, and do not wait in it for a thread that trains. A
    DataLoader's workers are free, and so is a process that is spawned; one that is forked while another
    thread is in a block would wait for ever at its own.
    """
    with DRAWING, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextmanager
def undisturbed(device: torch.device = CPU) -> Iterator[None]:
    """Give all generators of the process their states back, torch's as :func:`forked`."""
    with forked(device):
        python, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpys)  # noqa: NPY002


@contextmanager
def seeded(seed: Any, device: torch.device) -> Iterator[None]:
    """Seed torch for one client and round, as :func:`forked`: other threads wait.

    All that draws from torch, such as shuffling and dropout, then depends on (seed, round, partition)
    alone. Data that draws from numpy or `random` must seed these itself, and so must what draws on another
    device than the client's.
    """
    with forked(device):
        # on a CPU, torch.manual_seed formats a traceback for each accelerator that is not in use
        if device.type == "cpu":
            torch.default_generator.manual_seed(int(seed))
        else:
            torch.manual_seed(seed)
        yield


State = list[Tensor]


class Replay:
    """The batches of one round.

    What a loader draws (shuffling, augmentation) depends on the state of torch's random generators before
    each batch. So these states are kept instead of the batches: some 5 kB a step that draws anything.

    Parameters
    ----------
    data : Pairs
    device : torch.device
    batches, forwards : bool
        Whether the batches may be drawn again, and whether a step's forward pass may be run again.
    """

    def __init__(
        self, data: Pairs, device: torch.device, batches: bool = False, forwards: bool = False
    ) -> None:
        self._data, self._device = data, device
        self._batches, self.forwards = batches, forwards
        loader = data.source
        sampler = getattr(loader, "sampler", None)
        sampler = getattr(sampler, "sampler", sampler)  # that shuffles, inside a batch sampler
        of_loader = (getattr(loader, "generator", None), getattr(sampler, "generator", None))
        own = [g for g in of_loader if isinstance(g, Generator)]
        self._generators = [*dict.fromkeys([torch.default_generator, *own])]
        self._before: list[State] = []  # the generators before each batch
        self.in_ddp = False  # whether DistributedDataParallel splits the step over processes
        self._at_forward: tuple[State, Tensor | None] | None = None

    def draw(self, steps: int) -> Iterator[tuple[Any, Any]]:
        """Yield `steps` batches on the device."""
        drawn = on_device(cycle(self._data), self._device)
        for _ in range(steps):
            if self._batches:
                states = self._states()
                same = self._before and all(map(torch.equal, states, self._before[-1]))
                self._before.append(self._before[-1] if same else states)
            batch = next(drawn)
            if self.forwards:  # a compiled model has no hook
                self.note_forward()
            yield batch

    def note_forward(self, model: torch.nn.Module | None = None, *_: Any) -> None:
        """Note the generators before a forward pass that is trained on, and whether DDP splits the step."""
        wrapper = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        self.in_ddp = wrapper is not None and wrapper.process_group.size() > 1
        if model is None or (model.training and torch.is_grad_enabled()):
            self._at_forward = self._states(), self._cuda_state()

    def again(self, steps: int) -> Iterator[tuple[Any, Any]]:
        """Yield `steps` batches, those of :meth:`draw` first; the generators end where they were."""
        with self.restored():
            drawn = on_device(cycle(self._data), self._device)
            for i in range(steps):
                if i < len(self._before):
                    self._set(self._before[i])
                yield next(drawn)

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Draw as the forward pass of the present step did (dropout); then go on as if nothing had been."""
        with self.restored():
            if self._at_forward is not None:
                self._set(*self._at_forward)
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Leave the generators as they are before the block."""
        before = self._states(), self._cuda_state()
        try:
            yield
        finally:
            self._set(*before)

    def _states(self) -> State:
        return [g.get_state() for g in self._generators]

    def _set(self, states: State, cuda: Tensor | None = None) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._device)

    def _cuda_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
