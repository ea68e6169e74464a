"""Data sets as arrays: the package's, and a user's own. The readers are in sources/."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from flwr_regs.experiments.data.catalogue import SOURCES, kind_of, parsed

Array = np.ndarray


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
        name, arguments = parsed(dataset)
        data = Data(**SOURCES[name].read(data_dir, **arguments))
    if not data.augment:
        return data
    if data.train_x.ndim != 4 or data.train_x.dtype != np.float32:
        raise ValueError(
            f"dataset '{dataset}': the augmentation '{data.augment}' needs pictures as floats of shape (n, "
            f"channels, height, width), not {data.train_x.dtype} of shape {data.train_x.shape}"
        )
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
    if ":" not in dataset and dataset.partition("(")[0] != "image-folder":
        kind = kind_of(dataset)
        return np.zeros((2, *kind.shape), np.int32 if kind.tokens else np.float32), kind.classes
    data = load(dataset, data_dir, code_dir)
    return data.test_x[:2], data.num_classes
