"""Data sets as arrays. numpy only; scikit-learn for the digits, torchvision for MNIST."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray

DATASETS = ("digits", "mnist", "digits-domains", "mnist-domains")


@dataclass(frozen=True)
class Data:
    """Inputs (float32, ``(n, channels, height, width)``) and labels (int64, ``(n,)``)."""

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array


@lru_cache(maxsize=2)  # a Ray actor keeps it for all its clients
def load(dataset: str, data_dir: str) -> Data:
    """Return a data set.

    ``digits``: scikit-learn's 1,797 images of 8 x 8, one fifth of them for testing.
    ``mnist``: torchvision's, from `data_dir`, downloaded into it (default ``~/.cache/flwr_regs``) if
    it is not there. ``digits-domains``, ``mnist-domains``: the same images in [0, 1], for
    :func:`flwr_regs.experiments.domains.shifted`.

    Raises ImportError if a package is missing; the message names the extra to install. Raises OSError if
    MNIST is not there and cannot be downloaded.
    """
    name, _, domains = dataset.partition("-")
    found = {"digits": _digits, "mnist": _mnist}[name](data_dir)
    if name == "digits" or domains:
        return found
    return Data(_centred(found.train_x), found.train_y, _centred(found.test_x), found.test_y)


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
    try:
        from torchvision.datasets import MNIST
    except ImportError as error:
        raise missing_extra("torchvision", "MNIST") from error
    root = Path(data_dir or "~/.cache/flwr_regs").expanduser()
    download = not (root / "MNIST" / "raw").is_dir()
    try:
        parts: list[Any] = [MNIST(root, train=t, download=download) for t in (True, False)]
    except RuntimeError as error:
        raise OSError(
            f"there is no MNIST in {root}, and none came from the web: {error}"
        ) from error
    x = [(p.data.numpy() / 255).astype(np.float32)[:, None] for p in parts]
    return Data(x[0], parts[0].targets.numpy(), x[1], parts[1].targets.numpy())


def _centred(x: Array) -> Array:
    return ((x - 0.1307) / 0.3081).astype(np.float32)


def missing_extra(package: str, purpose: str) -> ImportError:
    """Return the error for a package of the simulation extra that is not installed."""
    return ImportError(f"{purpose} needs {package}: pip install 'flwr-regs[simulation]'")
