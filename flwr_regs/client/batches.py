"""A client's data: its batches, their number and size, and the device. Plain torch."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor, nn

Batches = Iterable[tuple[Any, Any]]
"""Pairs of (inputs, targets), such as a DataLoader."""

NO_DATA = (
    "the client has no training data: train_data holds no batch of (inputs, targets) "
    "(an empty partition, or drop_last=True with fewer examples than one batch)"
)


def cycle(data: Batches) -> Iterator[tuple[Any, Any]]:
    """Yield the batches again and again; a shuffling loader reshuffles on each pass.

    Raises ValueError if a pass yields no batch.
    """
    while True:
        empty = True
        for batch in data:
            empty = False
            yield batch
        if empty:
            raise ValueError(NO_DATA)


def count_batches(data: Batches) -> int:
    """Return the number of batches in one pass over `data`.

    Raises ValueError if there are none, TypeError if `data` can be iterated only once.
    """
    if isinstance(data, Iterator):
        raise TypeError(
            f"train_data is a {type(data).__name__}, which can be iterated only once; "
            "pass something that can be iterated again, such as a DataLoader or a list of batches"
        )
    try:
        batches = len(data)  # type: ignore[arg-type]
    except TypeError:  # also from a DataLoader over an IterableDataset without a length
        batches = sum(1 for _ in data)
    if batches == 0:
        raise ValueError(NO_DATA)
    return batches


def count_examples(data: Batches) -> int:
    """Return ``n_k``, the number of examples in one pass over `data`."""
    if (
        isinstance(data, torch.utils.data.DataLoader)
        and data.batch_size is not None
        and not data.drop_last
        and isinstance(data.sampler, Sized)
    ):
        return len(data.sampler)
    return sum(batch_size(targets) for _, targets in data)


def batch_size(targets: Any) -> int:
    """Return the number of examples in a batch: the length of its first tensor, at any depth."""
    leaves = _tensors(targets)
    return len(leaves[0]) if leaves else len(targets)


def resolve_device(device: str | torch.device) -> torch.device:
    """Return `device`; ``"auto"`` means the accelerator if there is one, else the CPU."""
    if device != "auto":
        return torch.device(device)
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def to_device(value: Any, device: str | torch.device) -> Any:
    """Move the tensors in nested dicts, lists and tuples; leave anything else unchanged."""
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return _like(value, [to_device(v, device) for v in value])
    return value.to(device) if isinstance(value, Tensor) else value


def label_counts(data: Batches) -> Tensor:
    """Return the number of examples of each class in one pass over `data`: int64, ``(largest label + 1,)``.

    torch's random state does not change; a generator that belongs to the loader advances.
    """
    with torch.random.fork_rng(devices=[]):
        labels = torch.cat([torch.as_tensor(targets).reshape(-1).cpu() for _, targets in data])
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"label counts need integer class labels, not {labels.dtype}")
    labels = labels.to(torch.int64)
    if bool((labels < 0).any()):
        raise ValueError(f"label counts need labels from 0 on, but there is {int(labels.min())}")
    return torch.bincount(labels)


class StartOutputs:
    """The outputs of a model in its current state and eval mode, computed once for each example.

    An example is identified by its content, so any shuffling loader works. If a loader augments an example
    anew on each pass, each result counts as another example.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        self._known: dict[bytes, Tensor] = {}

    @torch.no_grad()
    def __call__(self, inputs: Any, device: torch.device) -> Tensor:
        """Return the outputs on a batch."""
        tensors = [t.detach().cpu().contiguous() for t in _tensors(inputs)]
        if not tensors:
            raise TypeError(f"inputs must be or contain tensors, not {type(inputs).__name__}")
        # as bytes: numpy has no bfloat16
        leaves = [t.reshape(len(t), -1).view(torch.uint8).numpy() for t in tensors]
        keys = [
            hashlib.blake2b(b"".join(a[i].tobytes() for a in leaves), digest_size=16).digest()
            for i in range(len(leaves[0]))
        ]
        new = {k: i for i, k in enumerate(keys) if k not in self._known}
        if new:
            rows = list(new.values())
            outputs = self._model(to_device(_rows(inputs, rows), device))
            self._known.update(zip(new, outputs, strict=True))
        return torch.stack([self._known[k] for k in keys])


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict | list | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return [t for part in parts for t in _tensors(part)]
    return []


def _rows(value: Any, rows: list[int]) -> Any:
    if isinstance(value, dict):
        return {k: _rows(v, rows) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return _like(value, [_rows(v, rows) for v in value])
    return value[rows] if isinstance(value, Tensor) else value


def _like(value: Any, items: list[Any]) -> Any:
    """Return `items` as a sequence of the same type as `value`."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
