"""Data sets as arrays: the package's, and a user's own. scikit-learn and torchvision where needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from flwr_regs.experiments.extras import install_command

Array = np.ndarray

DATASETS = {
    "digits": "scikit-learn's 1,797 handwritten digits, 8 x 8 grey, 10 classes; comes with scikit-learn",
    "mnist": "70,000 handwritten digits, 28 x 28 grey, 10 classes; in data-dir, or downloaded",
    "digits-domains": "digits in five domains: client k has k mod 5, and tests on its own",
    "mnist-domains": "mnist in five domains: unchanged, inverted, over photographs, rotated, blurred",
}
"""Name -> its meaning in one line. Any other data set is a reference, such as ``mine.py:load``."""
SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28)}


@dataclass(frozen=True)
class Data:
    """Inputs (float32 or integers, ``(n, ...)``) and labels (int64 from 0 on, ``(n,)``).

    `groups` and `test_groups` are the writer, speaker, user or domain of each example, int64 from 0 on,
    ``(n,)``; None where there are none. `augment` names an augmentation of training batches.
    """

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    groups: Array | None = None
    test_groups: Array | None = None
    augment: str = ""

    @cached_property
    def num_classes(self) -> int:
        """The number of classes: the largest label of both parts, plus 1."""
        return int(max(self.train_y.max(), self.test_y.max())) + 1


@lru_cache(maxsize=2)  # a Ray actor keeps it for all its clients
def load(dataset: str, data_dir: str = "", code_dir: str = "") -> Data:
    """Return a data set.

    ``digits``: scikit-learn's 1,797 images of 8 x 8, one fifth of them for testing.
    ``mnist``: torchvision's, from `data_dir`, downloaded into it (default ``~/.cache/flwr_regs``) if
    it is not there. ``digits-domains``, ``mnist-domains``: the same images in [0, 1], for
    :func:`flwr_regs.experiments.domains.shifted`. A reference, such as ``mine.py:load``, is looked up in
    `code_dir` and called without arguments: see :func:`flwr_regs.experiments.own_data.arrays`.

    Raises ImportError if a package is missing; the message names the extra to install. Raises OSError if
    MNIST is not there and cannot be downloaded. Raises ValueError if a reference does not lead to data.
    """
    if ":" in dataset:
        from flwr_regs.experiments import own_data, user_code

        found = user_code.call(dataset, code_dir, seed=0)  # the same data in every process and run
        if isinstance(found, Data):
            found = (found.train_x, found.train_y, found.test_x, found.test_y)
        return Data(*own_data.arrays(found, dataset))
    name, _, domains = dataset.partition("-")
    data = {"digits": _digits, "mnist": _mnist}[name](data_dir)
    if name == "digits" or domains:
        return data
    return Data(_centred(data.train_x), data.train_y, _centred(data.test_x), data.test_y)


def two_examples(dataset: str, data_dir: str = "", code_dir: str = "") -> tuple[Array, int]:
    """Return (a batch of two inputs, the number of classes); only a user's own data set is loaded."""
    if ":" not in dataset:
        return np.zeros((2, *SHAPES[dataset.partition("-")[0]]), np.float32), 10
    data = load(dataset, data_dir, code_dir)
    return data.train_x[:2], data.num_classes


def _digits(data_dir: str) -> Data:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise missing_extra("scikit-learn", "the digits data") from error
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = np.random.default_rng(0).permutation(len(x))  # the split is part of the data set
    test, train = order[:360], order[360:]
    return Data(x[train], y[train].astype(np.int64), x[test], y[test].astype(np.int64))


def _mnist(data_dir: str) -> Data:
    from flwr_regs.experiments import mnist

    try:
        train_x, train_y, test_x, test_y = mnist.read(data_dir)
    except ImportError as error:
        raise missing_extra("torchvision", "MNIST") from error
    train_x, test_x = ((x / 255).astype(np.float32)[:, None] for x in (train_x, test_x))
    return Data(train_x, train_y, test_x, test_y)


def _centred(x: Array) -> Array:
    return ((x - 0.1307) / 0.3081).astype(np.float32)


def missing_extra(package: str, purpose: str) -> ImportError:
    """Return the error for a package of the simulation extra that is not installed."""
    return ImportError(f"{purpose} needs {package}: {install_command('simulation')}")
