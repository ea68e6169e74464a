"""Data sets as arrays, and the partitions the papers use. numpy only; torchvision for MNIST."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray

DATASETS = ("digits", "mnist", "digits-domains", "mnist-domains")
PARTITIONS = ("shards", "dirichlet", "similarity", "iid")


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

    Raises ImportError if a package is missing; the message names the extra to install.
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
    parts: list[Any] = [MNIST(root, train=t, download=download) for t in (True, False)]
    x = [(p.data.numpy() / 255).astype(np.float32)[:, None] for p in parts]
    return Data(x[0], parts[0].targets.numpy(), x[1], parts[1].targets.numpy())


def _centred(x: Array) -> Array:
    return ((x - 0.1307) / 0.3081).astype(np.float32)


def missing_extra(package: str, purpose: str) -> ImportError:
    """Return the error for a package of the simulation extra that is not installed."""
    return ImportError(f"{purpose} needs {package}: pip install 'flwr-regs[simulation]'")


def partition(
    labels: Array,
    kind: str,
    num_clients: int,
    seed: int,
    *,
    shards_per_client: int = 2,
    dirichlet_alpha: float = 0.1,
    similarity: float = 0.0,
) -> list[Array]:
    """Split ``range(len(labels))`` into `num_clients` index arrays, drawn from `seed` alone.

    ``iid``: at random. ``shards``: sort by label, cut into ``num_clients * shards_per_client`` shards,
    deal them at random (McMahan et al. 2017; FedADC's sort-and-partition). ``dirichlet``: each class
    is spread by Dirichlet(α) proportions (Hsu et al. 2019). ``similarity``: this per cent of the
    data is IID, the rest is sorted by label and cut in order (rFedAvg, Sec. VI).

    Raises ValueError if a client would get no data.
    """
    rng = np.random.default_rng(seed)
    split: dict[str, Callable[[], list[Array]]] = {
        "iid": lambda: np.array_split(rng.permutation(len(labels)), num_clients),
        "shards": lambda: _shards(labels, num_clients, shards_per_client, rng),
        "dirichlet": lambda: _dirichlet(labels, num_clients, dirichlet_alpha, rng),
        "similarity": lambda: _similarity(labels, num_clients, similarity, rng),
    }
    parts = split[kind]()
    if empty := [i for i, p in enumerate(parts) if len(p) == 0]:
        raise ValueError(
            f"partition '{kind}' of {len(labels)} examples over {num_clients} clients leaves clients "
            f"{empty} without data; use fewer clients or another seed"
        )
    return parts


def _shards(labels: Array, n: int, s: int, rng: np.random.Generator) -> list[Array]:
    shards = np.array_split(np.argsort(labels, kind="stable"), n * s)
    deal = rng.permutation(n * s).reshape(n, s)
    return [np.concatenate([shards[j] for j in hand]) for hand in deal]


def _dirichlet(labels: Array, n: int, alpha: float, rng: np.random.Generator) -> list[Array]:
    for _ in range(100):  # a draw may leave a client empty: then draw again
        parts: list[list[Array]] = [[] for _ in range(n)]
        for c in np.unique(labels):
            mine = rng.permutation(np.flatnonzero(labels == c))
            cuts = np.cumsum(rng.dirichlet(np.full(n, alpha)))[:-1] * len(mine)
            for client, chunk in zip(parts, np.split(mine, cuts.astype(int)), strict=True):
                client.append(chunk)
        joined = [np.concatenate(p) for p in parts]
        if min(len(p) for p in joined) > 0:
            break
    return joined


def _similarity(labels: Array, n: int, percent: float, rng: np.random.Generator) -> list[Array]:
    order = rng.permutation(len(labels))
    cut = round(len(labels) * percent / 100)
    rest = order[cut:]
    rest = rest[np.argsort(labels[rest], kind="stable")]
    return [
        np.concatenate(pair)
        for pair in zip(np.array_split(order[:cut], n), np.array_split(rest, n), strict=True)
    ]
