"""Google Landmarks by photographer, from TFF's tables and the user's pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from flwr_regs.experiments.data.sources import data_files as files
from flwr_regs.experiments.data.sources.data_files import Array, Parts

FOLDERS = ("", "gld", "gldv2", "landmarks-user-160k")
CENTRE = 0.875
"""The part of a test picture's height and width that is kept: Inception's preprocessing."""


def landmarks(data_dir: str, dataset: str, tables: Sequence[str], size: int, most: int) -> Parts:
    """Return GLD-23k or GLD-160k (Hsu et al. 2020): pictures in [-1, 1], ``(n, 3, size, size)``.

    Groups are the photographers. As in the Field Guide's code (Wang et al. 2021, App. B): at most `most`
    pictures of each photographer (0: all); the middle of test pictures, 87.5 % of each side; training
    batches are cut out at random and flipped, but their colours are not changed. The test pictures have no
    photographer, and so no group.

    The tables are TFF's, with the columns user_id, image_id and class. The pictures are ``images/ID.jpg``,
    or ``train/a/b/c/ID.jpg`` with the first three characters of the ID as folders, as Google ships them.
    """
    paths = files.matching(data_dir, FOLDERS, *tables)
    if paths is None:
        raise files.Missing
    (train_table,), (test_table,) = paths
    train = _rows(train_table, "user_id", "image_id", "class")
    test = _rows(test_table, "image_id", "class")
    users = train.groupby("user_id").ngroup()  # in order of their names
    kept = (train.groupby("user_id").cumcount() < most) | (most == 0)
    folder = train_table.parent
    train_x = _pictures(dataset, folder, train["image_id"][kept], size, 1.0)
    test_x = _pictures(dataset, folder, test["image_id"], size, CENTRE)
    train_y, test_y = train["class"][kept].to_numpy(), test["class"].to_numpy()
    parts = files.parts_of((train_x, train_y), (test_x, test_y))
    return {**parts, "groups": users[kept].to_numpy(np.int64), "augment": "cut-flip"}


def _rows(path: Path, *columns: str) -> pd.DataFrame:
    rows = pd.read_csv(path, dtype=str)
    if rows.empty or not {*columns} <= {*rows}:
        raise ValueError(
            f"{path} has the columns {', '.join(rows) if len(rows) else 'of no row'}; expected "
            f"{', '.join(columns)}"
        )
    return rows


def _pictures(dataset: str, folder: Path, names: Iterable[str], size: int, centre: float) -> Array:
    """Return the pictures of these names in [-1, 1]."""
    paths, missing = [], []
    for name in names:
        nested = files.inside(folder / "train", f"{'/'.join(name[:3])}/{name}.jpg")
        flat = folder / "images" / f"{name}.jpg"
        paths.append(flat if flat.is_file() else nested)
        missing += [] if paths[-1].is_file() else [name]
    if missing:
        raise FileNotFoundError(
            f"dataset '{dataset}': {len(missing)} of {len(paths)} pictures are missing in {folder}, "
            f"such as images/{missing[0]}.jpg"
        )
    return files.pictures(paths, "RGB", size, centre) * 2 - 1
