"""Data sets as arrays: the package's, a user's own, and parts of them. The readers are in sources/."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from flwr_regs.experiments.data.catalogue import kind_of, parsed

Array = np.ndarray

TEST_SHARE = 0.2
"""Test examples for each training example that is kept."""
RECORDS, CLASSES, GROUPS = 200, 5, 5
"""Of records that stand in: the training examples, their classes and their groups."""


@dataclass(frozen=True, eq=False)
class Data:
    """Inputs (float32 or integers, ``(n, ...)``) and labels (int64 from 0 on, ``(n,)``).

    Two of them are equal if they are one object, so that what follows from one can be kept.

    Attributes
    ----------
    groups, test_groups : Array or None
        The writer, speaker, user or domain of each example, from 0 on, int64 ``(n,)``.
    augment : str
        The name of an augmentation for training batches, of `flwr_regs.experiments.data.augment`; empty:
        none. The test inputs have gone through its counterpart, the training inputs have not.
    loss : str
        The name of a loss of `flwr_regs.experiments.data.losses`; empty: the cross-entropy.
    coarse : Array or None
        The superclass of each training example, int64 ``(n,)``.
    vectors : Array or None
        The vectors of the tokens, float32 ``(tokens, dimension)``, where the user has given them.
    """

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    groups: Array | None = None
    test_groups: Array | None = None
    augment: str = ""
    loss: str = ""
    coarse: Array | None = None
    vectors: Array | None = None

    @cached_property
    def num_classes(self) -> int:
        """The number of classes: the largest label of both parts, plus 1."""
        return int(max(self.train_y.max(), self.test_y.max())) + 1

    def tested(self, of_training: bool, rows: Any) -> tuple[Array, Array]:
        """Return inputs and labels, as they are tested, of some rows of the training or the test data."""
        if of_training:
            return untouched(self.train_x[rows], self.augment), self.train_y[rows]
        return self.test_x[rows], self.test_y[rows]

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits of the arrays: equal data, in the same order, has the same ones."""
        digest = blake2b(digest_size=8)
        for field in fields(self):
            part = getattr(self, field.name)
            if isinstance(part, np.ndarray):
                digest.update(f"{field.name} {part.shape} {part.dtype}".encode())
                digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


@lru_cache(maxsize=2)  # a Ray actor keeps it for all its clients
def load(dataset: str, data_dir: str = "", code_dir: str = "") -> Data:
    """Return a data set.

    Parameters
    ----------
    dataset : str
        A name of the catalogue, with arguments if it needs some: ``femnist(writers=100)``; its reader in
        sources/ says what they mean. Or a reference, such as ``mine.py:load``, which is called without
        arguments: see :func:`flwr_regs.experiments.data.own_data.fields_of`.
    data_dir : str
        The folder that has its files, or receives them (default ``~/.cache/flwr_regs``).
    code_dir : str
        Where a reference is looked up.

    Raises
    ------
    ImportError
        A package is missing; the message says how to install it.
    OSError
        Files are missing and cannot be downloaded; the message says which, and where they are expected.
    ValueError
        A file is not in the expected format, an argument does not exist, or a reference does not lead to
        data.
    """
    if ":" in dataset:
        from flwr_regs.experiments import user_code
        from flwr_regs.experiments.data import own_data

        # seeded: the same data in every process and run
        returned = user_code.call(dataset, code_dir, seed=0)
        data = Data(**own_data.fields_of(returned, dataset))
    else:
        _, arguments = parsed(dataset)
        data = Data(**kind_of(dataset).read(data_dir, **arguments))
    if not data.augment:
        return data
    if (x := data.train_x).ndim != 4 or x.dtype != np.float32:
        what = f"dataset '{dataset}': the augmentation '{data.augment}' needs pictures as floats"
        raise ValueError(f"{what} (n, channels, height, width), not {x.dtype} of shape {x.shape}")
    return replace(data, test_x=untouched(data.test_x, data.augment))


def untouched(x: Array, augment: str) -> Array:
    """Return inputs as they are tested where training batches are augmented."""
    import torch

    from flwr_regs.experiments.data.augment import AUGMENTATIONS

    return AUGMENTATIONS[augment].test(torch.from_numpy(x)).numpy()


def two_examples(dataset: str, data_dir: str = "", code_dir: str = "") -> tuple[Array, int]:
    """Return (a batch of two inputs, the number of classes).

    Only a user's own data set is loaded; the package's have zeros for inputs.
    """
    if ":" not in dataset and (kind := kind_of(dataset)).classes:
        return np.zeros((2, *kind.shape), np.int32 if kind.tokens else np.float32), kind.classes
    data = load(dataset, data_dir, code_dir)
    return data.test_x[:2].copy(), data.num_classes


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
    of_training = ("train_x", "train_y", "groups", "coarse"), examples
    of_test = ("test_x", "test_y", "test_groups"), test
    kept: dict[str, Any] = {}
    for names, count in (of_training, of_test):
        labels = getattr(data, names[1])
        rows = np.random.default_rng(0).permutation(len(labels))
        rows = rows[labels[rows] < (num_classes or np.inf)][: count or None]
        whole = {name: getattr(data, name) for name in names}
        kept |= {name: part[rows] for name, part in whole.items() if part is not None}
    return replace(data, **kept)


@lru_cache(maxsize=2)
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
