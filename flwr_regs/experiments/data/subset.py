"""Less than a data set: some of its classes or examples, and records that stand in for its files."""

from __future__ import annotations

from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from flwr_regs.experiments.data.datasets import Data, two_examples

TEST_SHARE = 0.2
"""Test examples for each training example that is kept."""
RECORDS, CLASSES, GROUPS = 200, 5, 5
"""Of records that stand in: the training examples, their classes and their groups."""


def reduced(data: Data, examples: int, num_classes: int) -> Data:
    """Return a part of a data set, drawn from seed 0, whatever group an example is of.

    Parameters
    ----------
    data : Data
    examples : int
        Training examples at most, and a fifth as many for testing; 0: all.
    num_classes : int
        Only the classes below; 0: all.
    """
    test = max(round(examples * TEST_SHARE), 1) if examples else 0
    kept: dict[str, Any] = {}
    for names, labels, count in (
        (("train_x", "train_y", "groups", "coarse"), data.train_y, examples),
        (("test_x", "test_y", "test_groups"), data.test_y, test),
    ):
        rows = np.random.default_rng(0).permutation(len(labels))
        if num_classes:
            rows = rows[labels[rows] < num_classes]
        rows = rows[:count] if count else rows
        whole = {name: getattr(data, name) for name in names}
        kept |= {name: part[rows] for name, part in whole.items() if part is not None}
    return replace(data, **kept)


def records(dataset: str, data_dir: str = "", code_dir: str = "") -> Data:
    """Return random records of a data set's shape: a stand-in to try a command without the files.

    They have five classes and five groups. Images are of normal values, texts of random tokens. Each class
    has a value of its own in the first entry.
    """
    inputs, classes = two_examples(dataset, data_dir, code_dir)
    rng = np.random.default_rng(0)
    parts: dict[str, Any] = {}
    for part, groups, n in (("train", "groups", RECORDS), ("test", "test_groups", RECORDS // 4)):
        y, shape = np.arange(n) % min(classes, CLASSES), (n, *inputs.shape[1:])
        floats = inputs.dtype.kind == "f"
        x = rng.normal(size=shape) if floats else rng.integers(0, 5, size=shape)
        x.reshape(n, -1)[:, 0] = y
        parts |= {f"{part}_x": x.astype(inputs.dtype), f"{part}_y": y}
        parts[groups] = np.arange(n) // CLASSES % GROUPS
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
