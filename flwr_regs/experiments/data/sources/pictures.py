"""Pictures with labels: digits, the MNIST family, CIFAR, and a folder of the user's pictures.

MNIST's mean and standard deviation are those of its training images; so are the others', channel by
channel.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from flwr_regs.experiments.data.sources import data_files as files
from flwr_regs.experiments.data.sources import tables
from flwr_regs.experiments.data.sources.data_files import Array, Parts
from flwr_regs.experiments.extras import missing_extra

CIFAR = {
    10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: ((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)),
}
"""Number of classes -> the training images' mean and standard deviation, by channel, in [0, 1]."""
EMNIST_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10}
AUGMENTATIONS = ("crop-flip", "crop-24", "")
"""What CIFAR's training pictures may go through, see :mod:`flwr_regs.experiments.data.augment`."""


def digits(data_dir: str) -> Parts:
    """Return scikit-learn's 1,797 digits in [0, 1], one fifth of them for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise missing_extra("scikit-learn", "the digits data") from error
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = np.random.default_rng(0).permutation(len(x))  # the split is part of the data set
    test, train = order[:360], order[360:]
    return _parts(x[train], y[train], x[test], y[test])


def mnist(data_dir: str) -> Parts:
    """Return MNIST, standardised."""
    return _idx(data_dir, "MNIST", 0.1307, 0.3081)


def mnist_grey(data_dir: str) -> Parts:
    """Return MNIST in [0, 1]."""
    return _idx(data_dir, "MNIST")


def fashion_mnist(data_dir: str) -> Parts:
    """Return Fashion-MNIST, standardised."""
    return _idx(data_dir, "FashionMNIST", 0.2860, 0.3530)


def _idx(data_dir: str, kind: str, mean: float = 0.0, std: float = 1.0) -> Parts:
    """Return torchvision's `kind` of MNIST, of [0, 1] with these moments taken out."""
    train, test = _torchvision(kind, kind, data_dir)
    (train_x, train_y), (test_x, test_y) = (
        ((_grey(part.data.numpy()) - mean) / std, part.targets.numpy()) for part in (train, test)
    )
    return _parts(train_x.astype(np.float32), train_y, test_x.astype(np.float32), test_y)


def emnist(data_dir: str, split: str = "balanced") -> Parts:
    """Return one of EMNIST's splits (Cohen et al. 2017) in [0, 1], upright, with labels from 0 on."""
    train, test = _torchvision("EMNIST", "emnist", data_dir, split=split)
    shift = 1 if split == "letters" else 0  # its labels begin at 1
    parts = [(p.data.numpy().swapaxes(1, 2), p.targets.numpy() - shift) for p in (train, test)]
    (train_x, train_y), (test_x, test_y) = parts
    return _parts(_grey(train_x), train_y, _grey(test_x), test_y)


def cifar10(data_dir: str, augment: str = "crop-flip", hub: bool = False) -> Parts:
    """Return CIFAR-10: see :func:`_cifar`."""
    return _cifar(10, data_dir, augment, hub)


def cifar100(data_dir: str, augment: str = "crop-flip", hub: bool = False) -> Parts:
    """Return CIFAR-100 with its 100 classes as labels; ``coarse`` has the training images' superclasses."""
    return _cifar(100, data_dir, augment, hub)


def _cifar(classes: int, data_dir: str, augment: str, hub: bool) -> Parts:
    """Return CIFAR from parquet files, torchvision's raw files, or the hub (`hub`).

    With the augmentation ``crop-24`` the pixels stay in [0, 255], because each image is standardised by
    itself after it was cut out; otherwise they are standardised by channel.
    """
    name = f"cifar{classes}"
    folders = ("", name, f"{name}/plain_text", "plain_text", f"{name}/{name}")
    parquets = files.found(data_dir, folders, "train*.parquet", "test*.parquet")
    if hub:
        parts_read = [_rows(tables.downloaded(f"uoft-cs/{name}", p)) for p in ("train", "test")]
    elif parquets:
        parts_read = [_rows(tables.read(part)) for part in parquets]
    else:
        kind = f"CIFAR{classes}"
        parts_read = [
            (p.data.transpose(0, 3, 1, 2).astype(np.float32) / 255, np.array(p.targets), None)
            for p in _torchvision(kind, name, data_dir)
        ]
    (train_x, train_y, coarse), (test_x, test_y, _) = parts_read
    if augment == "crop-24":
        train_x, test_x = train_x * np.float32(255), test_x * np.float32(255)
    else:
        for x in (train_x, test_x):
            files.standardised(x, *CIFAR[classes])
    parts = _parts(train_x, train_y, test_x, test_y)
    if classes == 100:
        parts["coarse"] = _coarse(train_y) if coarse is None else np.array(coarse, np.int64)
    return {**parts, "augment": augment}


def _rows(table: Any) -> tuple[Array, Array, Any]:
    """Return a CIFAR table's images in [0, 1], its labels, and its superclasses if it has them."""
    x = files.pictures(tables.column(table, "img", "image"), "RGB", 32)
    y = np.array(tables.column(table, "label", "fine_label"), np.int64)
    coarse = "coarse_label" in table.column_names
    return x, y, tables.column(table, "coarse_label") if coarse else None


# Krizhevsky (2009): superclass of each of the 100 classes, in alphabetical order of their names
_SUPERCLASSES = (
    "04 01 14 08 00 06 07 07 18 03 03 14 09 18 07 11 03 09 07 11 06 11 05 10 07 06 13 15 03 15 "
    "00 11 01 10 12 14 16 09 11 05 05 19 08 08 15 13 14 17 18 10 16 04 17 04 02 00 17 04 18 17 "
    "10 03 02 12 12 16 12 01 09 19 02 10 00 01 16 12 09 13 15 13 16 19 02 04 06 19 05 05 08 19 "
    "18 01 02 15 06 00 17 08 14 13"
)


def _coarse(fine: Array) -> Array:
    """Return CIFAR-100's superclass of each class."""
    return np.array(_SUPERCLASSES.split(), np.int64)[fine]


def image_folder(data_dir: str, size: int = 64, grey: bool = False, groups: bool = False) -> Parts:
    """Return pictures from ``train/CLASS/*`` and ``test/CLASS/*`` in [0, 1], scaled to a square of `size`.

    With `groups`, from ``train/GROUP/CLASS/*``: a group is a client's own pictures. Classes are the names
    of the folders, in order of the alphabet.
    """
    folder = files.root(data_dir)
    depth = "*/*/*" if groups else "*/*"
    listed = {part: sorted(_pictures(folder / part, depth)) for part in ("train", "test")}
    if not all(listed.values()):
        where = "train/GROUP/CLASS" if groups else "train/CLASS"
        raise files.absent(
            "image-folder",
            data_dir,
            f"pictures in {where}/ and in {where.replace('train', 'test')}/",
            "put them there",
        )
    classes = sorted({path.parent.name for part in listed.values() for path in part})
    names = sorted({path.parent.parent.name for part in listed.values() for path in part})
    parts: Parts = {}
    for part, key in (("train", "groups"), ("test", "test_groups")):
        paths = listed[part]
        parts[f"{part}_x"] = files.pictures(paths, "L" if grey else "RGB", size)
        parts[f"{part}_y"] = _indices([path.parent.name for path in paths], classes)
        if groups:
            parts[key] = _indices([path.parent.parent.name for path in paths], names)
    return parts


def _pictures(folder: Path, depth: str) -> list[Path]:
    endings = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
    return [path for path in folder.glob(depth) if path.suffix.lower() in endings]


def _indices(names: list[str], every: list[str]) -> Array:
    place = {name: i for i, name in enumerate(every)}
    return np.array([place[name] for name in names], np.int64)


def _torchvision(kind: str, dataset: str, data_dir: str, **settings: Any) -> list[Any]:
    """Return torchvision's training and test set; they are downloaded if they are not in the data-dir.

    What is missing or incomplete comes into a temporary folder first, and moves when all is there. A packed
    file of MNIST (``.gz``) that is there already is not downloaded again. torchvision checks the files' MD5
    sums before it reads CIFAR's pickles.
    """
    try:
        from torchvision import datasets
    except ImportError as error:
        raise missing_extra("torchvision", kind) from error
    root, make = files.root(data_dir), getattr(datasets, kind)
    with suppress(Exception):  # of torchvision, for files that are missing or incomplete
        return [make(root, train=t, **settings) for t in (True, False)]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root, prefix=f"{kind}-") as made:
            for packed in root.glob(f"{kind}/raw/*.gz"):
                (Path(made) / kind / "raw").mkdir(parents=True, exist_ok=True)
                shutil.copy(packed, Path(made) / kind / "raw")
            parts = [make(made, train=t, download=True, **settings) for t in (True, False)]
            shutil.copytree(made, root, dirs_exist_ok=True)
        return parts
    except Exception as error:  # of torchvision, urllib, zipfile or the disk
        why = next(iter(str(error).splitlines()), "").rstrip(": ") or type(error).__name__
        also = ", or train*.parquet and test*.parquet of the hub" if kind[:5] == "CIFAR" else ""
        raise OSError(
            f"dataset '{dataset}' is not in {root}, and the download failed ({why}): put torchvision's raw "
            f"files of {kind} there{also}, set data-dir to a folder that has them, or try again"
        ) from error


def _grey(x: Array) -> Array:
    """Return images of bytes, ``(n, height, width)``, in [0, 1], ``(n, 1, height, width)``."""
    return np.asarray((x / 255).astype(np.float32)[:, None])


def _parts(train_x: Array, train_y: Array, test_x: Array, test_y: Array) -> Parts:
    return {
        "train_x": train_x,
        "train_y": train_y.astype(np.int64),
        "test_x": test_x,
        "test_y": test_y.astype(np.int64),
    }
