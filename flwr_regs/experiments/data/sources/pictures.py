"""Pictures with labels: digits, the MNIST family, FEMNIST by writer, CIFAR, landmarks, a user's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from flwr_regs.experiments.data.sources import data_files as files
from flwr_regs.experiments.data.sources.data_files import Array, Parts, Users
from flwr_regs.experiments.extras import needed

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
TRAINED = 0.9
"""The share of a writer's examples that trains, where the files have no test split: LEAF's, TFF's too."""
LANDMARKS = ("", "gld", "gldv2", "landmarks-user-160k")
"""The folders of Google Landmarks."""
CENTRE = 0.875
"""The part of a test picture's height and width that is kept: Inception's preprocessing."""


def digits(data_dir: str) -> Parts:
    """Return scikit-learn's 1,797 digits in [0, 1], one fifth of them for testing."""
    datasets = needed("sklearn.datasets", "scikit-learn", "the digits data")
    x, y = datasets.load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = np.random.default_rng(0).permutation(len(x))  # the split is part of the data set
    test, train = order[:360], order[360:]
    return files.parts_of((x[train], y[train]), (x[test], y[test]))


def idx(data_dir: str, kind: str, mean: float, std: float, **split: str) -> Parts:
    """Return torchvision's `kind` of MNIST, of [0, 1] with the training images' moments taken out.

    A `split` is one of EMNIST's (Cohen et al. 2017): upright, with labels from 0 on.
    """
    first = 1 if "letters" in split.values() else 0  # of its labels
    turned = (0, 2, 1) if split else (0, 1, 2)
    parts = []
    for part in _torchvision(kind, data_dir, **split):
        grey = part.data.numpy().transpose(turned)[:, None].astype(np.float32) / 255
        parts.append(((grey - mean) / std, part.targets.numpy() - first))
    return files.parts_of(*parts)


def femnist(data_dir: str, writers: int, hub: bool) -> Parts:
    """Return FEMNIST (Caldas et al. 2018) in [0, 1], 28 x 28, 62 classes; groups are the writers.

    Paper is 1 and ink 0, as in LEAF and TFF. `writers` keeps so many of them, drawn from seed 0. From
    TFF's ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``, LEAF's ``train/*.json`` and ``test/*.json``,
    or the hub's ``*.parquet`` (`hub` downloads them), of which the last tenth of a writer's examples is
    for testing.
    """
    folders = () if hub else ("", "femnist", "femnist/data")
    if h5 := files.matching(data_dir, folders, "fed_emnist_train.h5", "fed_emnist_test.h5"):
        (first,), (last,) = h5
        train, test = files.hdf5(first, last, writers, "pixels", "label")
    elif leaf := files.leaf(data_dir, folders):
        train, test = leaf
        train = {user: train[user] for user in files.drawn(train, writers)}
    else:
        (table,) = files.tables(data_dir, folders, "flwrlabs/femnist", train="*.parquet")
        train, test = _of_table(table, writers)
    if writers:  # without, test writers may be others: LEAF can also split by writer
        test = {user: of for user, of in test.items() if user in train}

    def convert(of: tuple[Any, Any]) -> tuple[Array, Array]:
        return np.asarray(of[0], np.float32).reshape(-1, 1, 28, 28), np.ravel(np.asarray(of[1]))

    return files.by_group(train, test, convert)


def _of_table(table: Any, writers: int) -> list[Users]:
    import pandas as pd  # other pictures need not wait for it

    users = pd.Series(np.array(files.column(table, "writer_id"), str))
    rows_of = users.groupby(users).indices
    labels, packed = (np.array(files.column(table, name)) for name in ("character", "image"))
    parts: list[Users] = [{}, {}]
    for user in files.drawn(rows_of, writers):
        for part, chosen in zip(parts, files.cut(rows_of[user], TRAINED), strict=True):
            part[user] = files.pictures([*packed[chosen]], "L", 28), labels[chosen]
    return parts


def cifar(
    data_dir: str, classes: int, moments: Any, superclasses: Sequence[int], augment: str, hub: bool
) -> Parts:
    """Return CIFAR from parquet files, torchvision's raw files, or the hub (`hub`).

    With the augmentation ``crop-24`` the pixels stay in [0, 255], because each image is standardised by
    itself after it was cut out; otherwise they are standardised by channel, by `moments`: means and
    deviations. With `superclasses`, ``coarse`` has those of the training images.
    """
    name, splits = f"cifar{classes}", {"train": "train*.parquet", "test": "test*.parquet"}
    folders = ("", name, f"{name}/plain_text", "plain_text", f"{name}/{name}")
    try:
        both = files.tables(data_dir, () if hub else folders, f"uoft-cs/{name}", **splits)
    except files.Missing:
        raw = _torchvision(f"CIFAR{classes}", data_dir)
        images = [part.data.transpose(0, 3, 1, 2).astype(np.float32) / 255 for part in raw]
        labels = [np.array(part.targets) for part in raw]
    else:
        images = [files.pictures(files.column(t, "img", "image"), "RGB", 32) for t in both]
        labels = [np.array(files.column(t, "label", "fine_label"), np.int64) for t in both]
    mean, std = np.array(moments, np.float32)[:, :, None, None]
    for x in images:
        if augment == "crop-24":
            x *= 255
        else:
            x -= mean
            x /= std
    parts = files.parts_of(*zip(images, labels, strict=True))
    if superclasses:
        parts["coarse"] = np.array(superclasses, np.int64)[labels[0]]
    return {**parts, "augment": augment}


def landmarks(data_dir: str, tables: Sequence[str], size: int, most: int) -> Parts:
    """Return GLD-23k or GLD-160k (Hsu et al. 2020): pictures in [-1, 1], ``(n, 3, size, size)``.

    Groups are the photographers. As in the Field Guide's code (Wang et al. 2021, App. B): the middle of
    test pictures, 87.5 % of each side; training batches are cut out at random and flipped, but their
    colours are not changed. Of each photographer, the first `most` pictures of the table (0: all); that
    code draws so many anew in each round. The test pictures have no photographer, and so no group.

    The tables are TFF's, with the columns user_id, image_id and class. The pictures are ``images/ID.jpg``,
    or ``train/a/b/c/ID.jpg`` with the first three characters of the ID as folders, as Google ships them.
    """
    train_table, test_table = files.one_of_each(data_dir, LANDMARKS, *tables)
    train = _listed(train_table, "user_id", "image_id", "class")
    test = _listed(test_table, "image_id", "class")
    users = train.groupby("user_id").ngroup()  # in order of their names
    kept = (train.groupby("user_id").cumcount() < most) | (most == 0)
    folder = train_table.parent
    train_x = _photographs(folder, train["image_id"][kept], size, 1.0)
    test_x = _photographs(folder, test["image_id"], size, CENTRE)
    train_y, test_y = train["class"][kept].to_numpy(), test["class"].to_numpy()
    parts = files.parts_of((train_x, train_y), (test_x, test_y))
    return {**parts, "groups": users[kept].to_numpy(np.int64), "augment": "cut-flip"}


def _listed(path: Path, *columns: str) -> Any:
    import pandas as pd  # other pictures need not wait for it

    with files.reading(path, f"the columns {', '.join(columns)}, with a number in the last one"):
        return pd.read_csv(path, dtype=str)[[*columns]].astype({columns[-1]: int})


def _photographs(folder: Path, names: Iterable[str], size: int, centre: float) -> Array:
    """Return the pictures of these names in [-1, 1]."""
    paths = []
    for name in names:
        nested = files.inside(folder / "train", f"{'/'.join(name[:3])}/{name}.jpg")
        paths.append(nested if nested.is_file() else folder / "images" / f"{name}.jpg")
    return files.pictures(paths, "RGB", size, centre) * 2 - 1


def image_folder(data_dir: str, size: int, grey: bool, groups: bool) -> Parts:
    """Return pictures from ``train/CLASS/*`` and ``test/CLASS/*`` in [0, 1], scaled to a square of `size`.

    With `groups`, from ``train/GROUP/CLASS/*``: a group is a client's own pictures. Classes are the names
    of the folders, in order of the alphabet.
    """
    depth = "*/*/*" if groups else "*/*"
    both = files.matching(data_dir, [""], f"train/{depth}", f"test/{depth}") or [[], []]
    train, test = ([path for path in part if path.suffix.lower() in ENDINGS] for part in both)
    if not train or not test:
        raise files.Missing
    if strange := {path.parts[-2] for path in test} - {path.parts[-2] for path in train}:
        raise ValueError(f"test/ has classes that train/ lacks: {', '.join(sorted(strange))}")

    def numbers(level: int) -> list[Array]:
        """Return the places of the pictures' folders among the names of all folders of this level."""
        names = [path.parts[level] for path in (*train, *test)]
        return np.split(np.unique(names, return_inverse=True)[1], [len(train)])

    x = [files.pictures(paths, "L" if grey else "RGB", size) for paths in (train, test)]
    parts = files.parts_of(*zip(x, numbers(-2), strict=True))
    if groups:
        parts["groups"], parts["test_groups"] = numbers(-3)
    return parts


def _torchvision(kind: str, data_dir: str, **settings: Any) -> list[Any]:
    """Return torchvision's training and test set; they are downloaded if they are not in the data-dir.

    What is missing or incomplete comes into a temporary folder first, and moves when all is there. A packed
    file of MNIST (``.gz``) that is there already is not downloaded again. torchvision checks the files' MD5
    sums before it reads CIFAR's pickles. Raises `Missing` if the download fails.
    """
    datasets = needed("torchvision.datasets", "torchvision", kind)
    root, make = files.root(data_dir), getattr(datasets, kind)
    with suppress(Exception):  # of torchvision, for files that are missing or incomplete
        return [make(root, train=t, **settings) for t in (True, False)]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root, prefix=f"{kind}-") as fresh:
            raw = Path(fresh, kind, "raw")
            for packed in root.glob(f"{kind}/raw/*.gz"):
                raw.mkdir(parents=True, exist_ok=True)
                shutil.copy(packed, raw)
            parts = [make(fresh, train=t, download=True, **settings) for t in (True, False)]
            shutil.copytree(fresh, root, dirs_exist_ok=True)
        return parts
    except Exception as error:  # of torchvision, urllib, zipfile or the disk
        here = f"not in {root}"
        try:
            for path in sorted(root.glob(f"{kind}/raw/*-ubyte")):
                with files.reading(path, "a whole idx file"):
                    datasets.mnist.read_sn3_pascalvincent_tensor(str(path))
        except ValueError as damaged:
            here = str(damaged)
        why = next(iter(str(error).splitlines()), "").rstrip(": ") or type(error).__name__
        raise files.Missing(f"{here}, and the download failed: {why}") from error
