"""Google Landmarks by photographer, from TFF's tables and the user's pictures."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.data.sources import data_files as files
from flwr_regs.experiments.data.sources.data_files import Array, Parts

TABLES = {
    "gld-23k": ("mini_gld_train_split.csv", "mini_gld_test.csv"),
    "gld-160k": ("federated_train.csv", "test.csv"),
}
FOLDERS = ("", "gld", "gldv2", "landmarks-user-160k")
CENTRE = 0.875
"""The part of a test picture's height and width that is kept: Inception's preprocessing."""


def gld_23k(data_dir: str, size: int = 224, most: int = 64) -> Parts:
    """Return GLD-23k (Hsu et al. 2020): 203 classes, 233 photographers; see :func:`_landmarks`."""
    return _landmarks("gld-23k", data_dir, size, most)


def gld_160k(data_dir: str, size: int = 224, most: int = 64) -> Parts:
    """Return GLD-160k (Hsu et al. 2020): 2,028 classes, 1,262 photographers; see :func:`_landmarks`."""
    return _landmarks("gld-160k", data_dir, size, most)


def _landmarks(dataset: str, data_dir: str, size: int, most: int) -> Parts:
    """Return pictures in [-1, 1], ``(n, 3, size, size)``; groups are the photographers.

    As in the Field Guide's code (Wang et al. 2021, App. B): at most `most` pictures of each photographer
    (0: all); the middle of test pictures, 87.5 % of each side; training batches are cut out at random and
    flipped, but their colours are not changed. The test pictures have no photographer, and so no group.

    The tables are TFF's, with the columns user_id, image_id and class. The pictures are ``images/ID.jpg``,
    or ``train/a/b/c/ID.jpg`` with the first three characters of the ID as folders, as Google ships them.
    """
    found = files.found(data_dir, FOLDERS, *TABLES[dataset])
    if found is None:
        raise files.absent(
            dataset,
            data_dir,
            f"{' and '.join(TABLES[dataset])}, and the pictures in images/",
            "get the tables from TFF (storage.googleapis.com) and the pictures from Google Landmarks v2",
        )
    (train_table,), (test_table,) = found
    train = _rows(train_table, "user_id", "image_id", "class")
    test = _rows(test_table, "image_id", "class")
    counts: dict[str, int] = {}
    kept = []
    for row in train:
        counts[row["user_id"]] = counts.get(row["user_id"], 0) + 1
        if not most or counts[row["user_id"]] <= most:
            kept.append(row)
    place = {user: i for i, user in enumerate(sorted(counts))}
    return {
        "train_x": _pictures(dataset, train_table.parent, kept, size),
        "train_y": _classes(kept),
        "groups": np.array([place[row["user_id"]] for row in kept], np.int64),
        "test_x": _pictures(dataset, train_table.parent, test, size, CENTRE),
        "test_y": _classes(test),
        "augment": "cut-flip",
    }


def _rows(path: Path, *columns: str) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {*columns} <= {*rows[0]}:
        raise ValueError(
            f"{path} has the columns {', '.join(rows[0]) if rows else 'of no row'}; expected "
            f"{', '.join(columns)}"
        )
    return rows


def _classes(rows: list[dict[str, str]]) -> Array:
    return np.array([int(row["class"]) for row in rows], np.int64)


def _pictures(
    dataset: str, folder: Path, rows: list[dict[str, str]], size: int, centre: float = 1.0
) -> Array:
    where = [_place(folder, row["image_id"]) for row in rows]
    if missing := [row["image_id"] for row, path in zip(rows, where, strict=True) if path is None]:
        raise FileNotFoundError(
            f"dataset '{dataset}': {len(missing)} of {len(rows)} pictures are missing in {folder}, such as "
            f"images/{missing[0]}.jpg"
        )
    out = np.empty((len(rows), 3, size, size), np.float32)
    for i, path in enumerate(where):
        out[i] = _middle(path, size, centre)
    out /= 127.5
    out -= 1
    return out


def _place(folder: Path, name: str) -> Path | None:
    nested = files.inside(folder, f"{'/'.join(name[:3])}/{name}.jpg")
    for path in (folder / "images" / f"{name}.jpg", folder / "train" / nested.relative_to(folder)):
        if path.is_file():
            return path
    return None


def _middle(path: Any, size: int, centre: float) -> Array:
    """Return the middle part of a picture, scaled to a square."""
    whole = files.picture(path, "RGB")
    if centre < 1:
        height, width = whole.shape[1:]
        top, left = (int(edge * (1 - centre) / 2) for edge in (height, width))
        whole = whole[:, top : height - top, left : width - left]
    from PIL import Image

    cut = Image.fromarray(np.ascontiguousarray(whole.transpose(1, 2, 0)))
    return np.asarray(cut.resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
