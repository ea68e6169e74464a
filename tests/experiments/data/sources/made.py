"""A few records of each data set, written in the format of its source."""

import io
import json
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from flwr_regs.experiments.data.catalogue import SOURCES
from flwr_regs.experiments.data.sources.texts import CSV_FIELDS, WINDOW

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


class Files:
    """A folder; each method writes a data set into it, with the same random pixels in each test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rng = np.random.default_rng(0)

    def path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def text(self, name: str, content: str) -> None:
        self.path(name).write_text(content)

    def pixels(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, 256, shape, dtype=np.uint8)

    def png(self, *shape: int) -> bytes:
        out = io.BytesIO()
        Image.fromarray(self.pixels(*shape)).save(out, "PNG")
        return out.getvalue()

    def parquet(self, name: str, **columns: Any) -> None:
        pytest.importorskip("pyarrow")
        pd.DataFrame(columns).to_parquet(self.path(name))

    def pickled(self, name: str, thing: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> None:
        self.path(name).write_bytes(pickle.dumps(thing, protocol))

    def hdf5(self, name: str, users: dict[str, dict[str, Any]]) -> None:
        h5py = pytest.importorskip("h5py")
        with h5py.File(self.path(name), "w") as file:
            for user, columns in users.items():
                for column, values in columns.items():
                    file[f"examples/{user}/{column}"] = values

    def leaf(self, part: str, users: dict[str, tuple[list[Any], list[Any]]]) -> None:
        """LEAF's JSON: here, two files, the second with the last user."""
        names = list(users)
        for i, some in enumerate((names[:-1], names[-1:])):
            numbers = [len(users[u][1]) for u in some]
            of_users = {u: dict(zip("xy", users[u], strict=True)) for u in some}
            content = {"users": some, "num_samples": numbers, "user_data": of_users}
            self.text(f"{part}/all_data_{i}.json", json.dumps(content))

    def idx(
        self, kind: str = "MNIST", prefix: Sequence[str] = ("train", "t10k"), first: int = 0
    ) -> None:
        """MNIST's idx files of 30 and 10 images; EMNIST's classes may begin at 1."""
        for part, count in zip(prefix, (30, 10), strict=True):
            head = struct.pack(">HBB3I", 0, 8, 3, count, 28, 28)
            images = self.path(f"{kind}/raw/{part}-images-idx3-ubyte")
            images.write_bytes(head + self.pixels(count, 28, 28).tobytes())
            labels = (np.arange(count) % (26 if first else 10) + first).astype(np.uint8)
            head = struct.pack(">HBBI", 0, 8, 1, count)
            self.path(f"{kind}/raw/{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())

    def emnist(self, split: str, first: int = 0) -> None:
        self.idx("EMNIST", [f"emnist-{split}-{part}" for part in ("train", "test")], first)

    def cifar(self, classes: int, label: str = "label", *holes: int) -> None:
        for part, count in (("train", 20), ("test", 10)):
            pictures: list[Any] = [{"bytes": self.png(32, 32, 3), "path": ""} for _ in range(count)]
            for row in holes:
                pictures[row] = None
            columns: dict[str, Any] = {"img": pictures, label: np.arange(count) % classes}
            self.parquet(f"cifar{classes}/{part}-00000-of-00001.parquet", **columns)

    def femnist(self) -> None:
        for part, count in (("train", 4), ("test", 2)):
            users = {w: (self.rng.random((count, 784)).tolist(), [*range(count)]) for w in "ba"}
            self.leaf(part, users)

    def femnist_tff(self) -> None:
        for part in ("train", "test"):
            pixels = self.rng.random((3, 3, 28, 28), np.float32)
            label = np.array([61, 0, 5], np.int32)
            users = {f"f{i}": {"pixels": of, "label": label} for i, of in enumerate(pixels)}
            self.hdf5(f"fed_emnist_{part}.h5", users)

    def femnist_hub(self) -> None:
        packed = [{"bytes": self.png(28, 28), "path": None} for _ in range(20)]
        columns = {"image": packed, "writer_id": ["w1", "w0"] * 10, "character": [*range(20)]}
        self.parquet("train-0.parquet", **columns)

    def shakespeare(self) -> None:
        self.text("input.txt", PLAY)

    def shakespeare_leaf(self) -> None:
        line = "To be, or not to be.".rjust(WINDOW)
        for part in ("train", "test"):
            self.leaf(part, {who: ([line] * 2, ["T", "h"]) for who in ("HAMLET", "OPHELIA")})

    def tweets(self) -> pd.DataFrame:
        """Two accounts of ten tweets, one of one; sad ones first, as the source has them."""
        rows = [
            (4 * good, DATES[day], user, f"day {9 - day} is {('bad', 'good')[good]}, @{user}")
            for good in (0, 1)
            for user in ("ann", "bob")
            for day in range(1 - good, 10, 2)
        ]
        rows.append((4, DATES[0], "cid", "once"))
        tweets = pd.DataFrame(rows, columns=["sentiment", "date", "user", "text"])
        return tweets.assign(id=range(len(rows)), query="NO_QUERY")[CSV_FIELDS]

    def sentiment140(self) -> None:
        self.tweets().to_csv(self.path("training.csv"), header=False, index=False, quoting=1)
        self.text("glove.txt", "is 1 2 3\nunheard 4 5 6\nday -1 0 0.5\n")

    def sentiment140_hub(self) -> None:
        rows = self.tweets().astype({"sentiment": int})
        self.parquet("train-0.parquet", **rows.to_dict("list"))

    def sentiment140_leaf(self) -> None:
        for part in ("train", "test"):
            rows = {u: [["id", "date", "q", u, f"{u} is {part}"]] * 2 for u in ("ann", "bob")}
            self.leaf(part, {u: (tweets, [1, 0]) for u, tweets in rows.items()})

    def stackoverflow(self) -> None:
        self.text("stackoverflow.word_count", "the 9\nhow 5\nto 4\nrun 2\n")
        sentences = {"tokens": [b"how to run", b"the unknown"]}
        self.hdf5("stackoverflow_train.h5", dict.fromkeys(("00000001", "00000002"), sentences))
        self.hdf5("stackoverflow_test.h5", {"00000001": {"tokens": [b"to the"]}})

    def digits_five(self) -> None:
        shapes = [(28, 28), (32, 32, 3), (16, 16), (32, 32, 3), (28, 28, 3)]
        names = {"partitions/train_part0": 12, "partitions/train_part1": 12, "test": 10}
        for domain, shape in zip(SOURCES["digits-five"].fixed["domains"], shapes, strict=True):
            for name, count in names.items():
                part = self.pixels(count, *shape), np.arange(count) % 10
                self.pickled(f"{domain}/{name}.pkl", part)

    def listed(self, dataset: str) -> None:
        """Each domain has 20 training pictures, the first one 24, and 10 test pictures."""
        name, domains, classes = SOURCES[dataset].fixed.values()
        for domain in domains:
            for part, count in (("train", 24 if domain == domains[0] else 20), ("test", 10)):
                labels = [classes[i % len(classes)] for i in range(count)]
                paths = [f"{name}/{domain}/{labels[i]}/{part}_{i}.png" for i in range(count)]
                for i, path in enumerate(paths):
                    self.path(path).write_bytes(self.png(40, 30, *((3,) if i else ())))
                self.pickled(f"{name}/{domain}_{part}.pkl", (np.array(paths), np.array(labels)))

    def landmarks(self, train: str, test: str) -> None:
        for i in range(8):
            folder = "images" if i else "train/a/b/c"
            self.path(f"{folder}/abc{i}.jpg").write_bytes(self.png(50, 60, 3))
        rows = [f"{7 if i < 5 else 3},abc{i},{i % 3}" for i in range(8)]
        self.text(train, "\n".join(["user_id,image_id,class", *rows]))
        self.text(test, "image_id,class\nabc1,0\nabc2,2")

    def image_folder(self, *groups: str) -> None:
        for part, count in (("train", 3), ("test", 1)):
            for group in groups or (".",):
                for name in [f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(count)]:
                    self.path(f"{part}/{group}/{name}").write_bytes(self.png(20, 30, 3))
        self.text("train/notes.txt", "no picture")
