"""A client's data: batches, how many, and on which device. Plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor

Batches = Iterable[tuple[Any, Any]]
"""Pairs of (inputs, targets), such as a DataLoader."""


def cycle(data: Batches) -> Iterator[tuple[Any, Any]]:
    """Yield the batches over and over; a shuffling loader shuffles anew on each pass."""
    while True:
        yield from data


def count_batches(data: Batches) -> int:
    """Return the batches in one pass over `data`.

    Raises ValueError if there are none, TypeError if `data` can be iterated only once.
    """
    if isinstance(data, Iterator):
        raise TypeError(
            f"train_data is a {type(data).__name__}, which can be iterated only once; "
            "pass something that can be iterated again, such as a DataLoader or a list of batches"
        )
    batches = len(data) if isinstance(data, Sized) else sum(1 for _ in data)
    if batches == 0:
        raise ValueError(
            "the client has no training data: train_data holds no batch of (inputs, targets) "
            "(an empty partition, or drop_last=True with fewer examples than one batch)"
        )
    return batches


def count_examples(data: Batches) -> int:
    """Return ``n_k``, the examples in one pass over `data`."""
    if (
        isinstance(data, torch.utils.data.DataLoader)
        and data.batch_size is not None
        and not data.drop_last
        and isinstance(data.sampler, Sized)
    ):
        return len(data.sampler)
    return sum(len(targets) for _, targets in data)


def resolve_device(device: str | torch.device) -> torch.device:
    """Return `device`, where ``"auto"`` is the accelerator if there is one, else the CPU."""
    if device != "auto":
        return torch.device(device)
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def to_device(value: Any, device: str | torch.device) -> Any:
    """Move the tensors in nested dicts, lists and tuples; leave anything else as it is."""
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value
