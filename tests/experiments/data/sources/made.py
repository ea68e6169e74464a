"""A few records of each data set, written in the format of its source."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from flwr_regs.experiments.data.sources import digit_domains as fedbn
from flwr_regs.experiments.data.sources.texts import CSV_FIELDS, WINDOW

RNG = np.random.default_rng(0)
PLAY = """First Citizen:
Before we proceed any further,
hear me speak. It is $3.

ALL:
Speak, speak:
say it
again.

First Citizen:
You are all resolved
rather to die
than to famish?

Ghost:
Boo.
"""
DATES = [f"Mon Apr {day:02d} 22:19:45 PDT 2009" for day in range(1, 11)]


def idx(folder: Path, kind: str, prefix: Sequence[str], classes: int = 10, first: int = 0) -> None:
    """MNIST's idx files of 30 and 10 images."""
    raw = folder / kind / "raw"
    raw.mkdir(parents=True)
    for part, count in zip(prefix, (max(30, classes), 10), strict=True):
        images = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        head = struct.pack(">HBB3I", 0, 8, 3, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = (np.arange(count) % classes + first).astype(np.uint8)
        head = struct.pack(">HBBI", 0, 8, 1, count)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def mnist(folder: Path, kind: str = "MNIST") -> None:
    idx(folder, kind, ("train", "t10k"))


def emnist(folder: Path, split: str, classes: int, first: int = 0) -> None:
    idx(folder, "EMNIST", [f"emnist-{split}-{part}" for part in ("train", "test")], classes, first)


def png(height: int, width: int, channels: int = 3) -> bytes:
    out = io.BytesIO()
    shape = (height, width, 3) if channels == 3 else (height, width)
    Image.fromarray(RNG.integers(0, 256, shape, dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


def parquet(path: Path, **columns: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(columns).to_parquet(path)


def cifar(folder: Path, classes: int) -> None:
    label = "fine_label" if classes == 100 else "label"
    for part, count in (("train", 20), ("test", 10)):
        pictures = [{"bytes": png(32, 32), "path": f"{i}.png"} for i in range(count)]
        columns: dict[str, Any] = {"img": pictures, label: np.arange(count) % classes}
        parquet(folder / f"cifar{classes}" / f"{part}-00000-of-00001.parquet", **columns)


def leaf(folder: Path, users: dict[str, tuple[list[Any], list[Any]]]) -> None:
    """LEAF's JSON: here, two files, the second with the last user."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(users)
    for i, part in enumerate((names[:-1], names[-1:])):
        data = {
            "users": part,
            "num_samples": [len(users[u][1]) for u in part],
            "user_data": {u: {"x": users[u][0], "y": users[u][1]} for u in part},
        }
        (folder / f"all_data_{i}.json").write_text(json.dumps(data))


def hdf5(path: Path, users: dict[str, dict[str, Any]]) -> None:
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for user, columns in users.items():
            for name, values in columns.items():
                file[f"examples/{user}/{name}"] = values


def femnist(folder: Path) -> None:
    for part, count in (("train", 4), ("test", 2)):
        images = [[round(0.1 * i, 1)] * 784 for i in range(count)]
        leaf(folder / part, {w: (images, [i % 62 for i in range(count)]) for w in ("f1", "f0")})


def shakespeare(folder: Path) -> None:
    (folder / "input.txt").write_text(PLAY)


def shakespeare_leaf(folder: Path) -> None:
    line = (" " * WINDOW + "To be, or not to be.")[-WINDOW:]
    for part in ("train", "test"):
        leaf(folder / part, {who: ([line, line], ["T", "h"]) for who in ("HAMLET", "OPHELIA")})


def sentiment140(folder: Path) -> None:
    """Two accounts of ten tweets, one of one; sad ones first, as the source has them."""
    rows = [
        (polarity, DATES[day], user, f"day {9 - day} is {'good' if polarity else 'bad'}, @{user}")
        for polarity in (0, 4)
        for user in ("ann", "bob")
        for day in range(0 if polarity else 1, 10, 2)
    ]
    rows.append((4, DATES[0], "cid", "once"))
    tweets = pd.DataFrame(rows, columns=["sentiment", "date", "user", "text"])
    tweets = tweets.assign(id=range(len(rows)), query="NO_QUERY")[CSV_FIELDS]
    tweets.to_csv(folder / "training.csv", header=False, index=False, quoting=1)


def stackoverflow(folder: Path) -> None:
    (folder / "stackoverflow.word_count").write_text("the 9\nhow 5\nto 4\nrun 2\n")
    sentences = {"tokens": [b"how to run", b"the unknown"]}
    hdf5(folder / "stackoverflow_train.h5", dict.fromkeys(("00000001", "00000002"), sentences))
    hdf5(folder / "stackoverflow_test.h5", {"00000001": {"tokens": [b"to the"]}})


def pickled(path: Path, thing: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(thing, protocol))


def digits_five(folder: Path) -> None:
    shapes = [(28, 28), (32, 32, 3), (16, 16), (32, 32, 3), (28, 28, 3)]
    names = {"partitions/train_part0": 12, "partitions/train_part1": 12, "test": 10}
    for domain, shape in zip(fedbn.DIGITS, shapes, strict=True):
        for name, count in names.items():
            images = RNG.integers(0, 256, (count, *shape), dtype=np.uint8)
            pickled(folder / domain / f"{name}.pkl", (images, np.arange(count) % 10))


def listed(folder: Path, dataset: str) -> None:
    """Each domain has 20 training pictures, the first one 24, and 10 test pictures."""
    name, domains, classes = fedbn.LISTED[dataset]
    for domain in domains:
        for part, count in (("train", 24 if domain == domains[0] else 20), ("test", 10)):
            labels = [classes[i % len(classes)] for i in range(count)]
            paths = [f"{name}/{domain}/{labels[i]}/{part}_{i}.png" for i in range(count)]
            for i, path in enumerate(paths):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(png(40, 30, 1 if i == 0 else 3))
            pickled(folder / name / f"{domain}_{part}.pkl", (np.array(paths), np.array(labels)))


def landmarks(folder: Path, train: str, test: str) -> None:
    nested = folder / "train/a/b/c"
    for place in (folder / "images", nested):
        place.mkdir(parents=True)
    for i in range(8):
        place = nested if i == 0 else folder / "images"
        (place / f"abc{i}.jpg").write_bytes(png(50, 60))
    rows = [(7 if i < 5 else 3, f"abc{i}", i % 3) for i in range(8)]
    table = pd.DataFrame(rows, columns=["user_id", "image_id", "class"])
    table.to_csv(folder / train, index=False)
    pd.DataFrame({"image_id": ["abc1", "abc2"], "class": [0, 2]}).to_csv(folder / test, index=False)


def image_folder(folder: Path, groups: bool = False) -> None:
    for part, count in (("train", 3), ("test", 1)):
        for kind in ("cat", "dog"):
            for group in ("ann", "bob") if groups else ("",):
                where = folder / part / group / kind
                where.mkdir(parents=True)
                for i in range(count):
                    (where / f"{i}.png").write_bytes(png(20, 30))
    (folder / "train" / "notes.txt").write_text("no picture")


def nothing(folder: Path) -> None:
    pass


MADE: dict[str, Callable[[Path], None]] = {
    "digits": nothing,
    "mnist": mnist,
    "fashion-mnist": lambda folder: mnist(folder, "FashionMNIST"),
    "emnist": lambda folder: emnist(folder, "balanced", 47),
    "emnist(split='letters')": lambda folder: emnist(folder, "letters", 26, first=1),
    "femnist": femnist,
    "cifar10": lambda folder: cifar(folder, 10),
    "cifar10(augment='crop-24')": lambda folder: cifar(folder, 10),
    "cifar100": lambda folder: cifar(folder, 100),
    "shakespeare": shakespeare,
    "sentiment140": sentiment140,
    "synthetic(0.5, 0.5, clients=4)": nothing,
    "quadratics": nothing,
    "digits-domains": nothing,
    "mnist-domains": mnist,
    "digits-five": digits_five,
    "office-caltech(size=32)": lambda folder: listed(folder, "office-caltech"),
    "domainnet(share=0.5, size=32)": lambda folder: listed(folder, "domainnet"),
    "gld-23k(size=32)": lambda f: landmarks(f, "mini_gld_train_split.csv", "mini_gld_test.csv"),
    "gld-160k(size=32)": lambda f: landmarks(f, "federated_train.csv", "test.csv"),
    "stackoverflow(users=2, words=4)": stackoverflow,
    "image-folder(size=16)": image_folder,
}
"""A data set, with the arguments that make it small -> what writes its files into a folder."""
NEEDS = {"cifar10": "pyarrow", "cifar100": "pyarrow", "stackoverflow": "h5py"}
"""Name -> a package that writing its files needs."""
