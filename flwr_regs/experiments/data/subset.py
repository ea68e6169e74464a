"""Less than a data set: some of its classes or examples, and records that stand in for its files."""

from __future__ import annotations

from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from flwr_regs.experiments.data.datasets import Array, Data, two_examples

TEST_SHARE = 0.2
"""Test examples for each training example that is kept."""
RECORDS, CLASSES, GROUPS = 200, 5, 5
"""Of records that stand in: the training examples, their classes and their groups."""


def reduced(data: Data, examples: int, num_classes: int, num_groups: int) -> Data:
    """Return a part of a data set, drawn from seed 0.

    Parameters
    ----------
    data : Data
    examples : int
        Training examples at most, and a fifth as many for testing; 0: all. Where the examples have groups,
        each of the first `num_groups` has an equal share of them, as far as it reaches.
    num_classes : int
        Only the classes below; 0: all.
    num_groups : int
        Counts where `examples` is not 0.
    """
    test = max(round(examples * TEST_SHARE), 1) if examples else 0
    kept: dict[str, Any] = {}
    for names, labels, groups, count in (
        (("train_x", "train_y", "groups", "coarse"), data.train_y, data.groups, examples),
        (("test_x", "test_y", "test_groups"), data.test_y, data.test_groups, test),
    ):
        rows = _rows(labels, groups, count, num_classes, num_groups)
        whole = {name: getattr(data, name) for name in names}
        kept |= {name: part[rows] for name, part in whole.items() if part is not None}
    return replace(data, **kept)


def _rows(
    labels: Array, groups: Array | None, examples: int, num_classes: int, num_groups: int
) -> Array:
    order = np.random.default_rng(0).permutation(len(labels))
    if num_classes:
        order = order[labels[order] < num_classes]
    if examples and groups is not None:
        most = max(-(-examples // num_groups), 1)
        of_groups = [order[groups[order] == g][:most] for g in range(num_groups)]
        order = np.concatenate(of_groups)
    return order[:examples] if examples else order


def records(dataset: str, data_dir: str = "", code_dir: str = "") -> Data:
    """Return random records of a data set's shape: a stand-in to try a command without the files.

    They have five classes and five groups. Images are of normal values, texts of random tokens. Each class
    has a value of its own in the first entry.
    """
    inputs, classes = two_examples(dataset, data_dir, code_dir)
    rng = np.random.default_rng(0)
    parts: dict[str, Any] = {}
    for part, groups, n in (
        ("train", "groups", RECORDS),
        ("test", "test_groups", RECORDS // 4),
    ):
        y = np.arange(n) % min(classes, CLASSES)
        shape = (n, *inputs.shape[1:])
        if inputs.dtype.kind == "f":
            x = rng.normal(size=shape).astype(inputs.dtype)
        else:
            x = rng.integers(0, 5, size=shape).astype(inputs.dtype)
        x.reshape(n, -1)[:, 0] = y
        parts |= {f"{part}_x": x, f"{part}_y": y.astype(np.int64)}
        parts[groups] = (np.arange(n) // CLASSES % GROUPS).astype(np.int64)
    return Data(**parts)


def fingerprint(data: Data) -> str:
    """Return 16 hexadecimal digits of the arrays: equal data, in the same order, has the same ones."""
    digest = blake2b(digest_size=8)
    for field in fields(data):
        part = getattr(data, field.name)
        if isinstance(part, np.ndarray):
            digest.update(f"{field.name} {part.shape} {part.dtype}".encode())
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()
