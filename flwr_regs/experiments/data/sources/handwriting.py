"""FEMNIST by writer, from LEAF's JSON, TFF's HDF5 or the hub's parquet; and readers of users' files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.data.sources import data_files as files
from flwr_regs.experiments.data.sources import tables
from flwr_regs.experiments.data.sources.data_files import Array, Parts
from flwr_regs.experiments.extras import missing_extra

Users = dict[str, tuple[Any, Any]]
"""User -> (inputs, labels), as a file has them."""

TRAINED = 0.9
"""The share of a writer's examples that trains, where the files have no test split: LEAF's, TFF's too."""


def femnist(data_dir: str, writers: int = 0, hub: bool = False) -> Parts:
    """Return FEMNIST (Caldas et al. 2018) in [0, 1], 28 x 28, 62 classes; groups are the writers.

    Paper is 1 and ink 0, as in LEAF and TFF. `writers` keeps so many of them, drawn from seed 0. From
    TFF's ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``, LEAF's ``train/*.json`` and ``test/*.json``,
    or the hub's ``*.parquet`` (`hub` downloads them), of which the last tenth of a writer's examples is
    for testing.
    """
    folders = ("", "femnist", "femnist/data")
    h5 = files.found(data_dir, folders, "fed_emnist_train.h5", "fed_emnist_test.h5")
    leaf = files.found(data_dir, folders, "train/*.json", "test/*.json")
    parquet = files.found(data_dir, folders, "*.parquet")
    if hub:
        train, test = _of_table(tables.downloaded("flwrlabs/femnist", "train"), writers)
    elif h5:
        (first,), (last,) = h5
        users = files.drawn(hdf5_users(first), writers)
        train, test = (
            {user: (of["pixels"], of["label"]) for user, of in hdf5(path, users)}
            for path in (first, last)
        )
    elif leaf:
        train, test = (users_of(part) for part in leaf)
        train = {user: train[user] for user in files.drawn(train, writers)}
    elif parquet:
        train, test = _of_table(tables.read(parquet[0]), writers)
    else:
        raise files.absent(
            "femnist",
            data_dir,
            "fed_emnist_train.h5 and fed_emnist_test.h5, train/*.json and test/*.json, or *.parquet",
            "get them from TFF, LEAF or the hub's flwrlabs/femnist, or say femnist(hub=True)",
        )
    if writers:  # without, test writers may be others: LEAF can also split by writer
        test = {user: of for user, of in test.items() if user in train}
    return files.by_group(
        {user: _images(*of) for user, of in train.items()},
        {user: _images(*of) for user, of in test.items()},
    )


def _images(x: Any, y: Any) -> tuple[Array, Array]:
    images = np.asarray(x, np.float32).reshape(-1, 1, 28, 28)
    return images, np.asarray(y, np.int64).reshape(-1)


def _of_table(table: Any, writers: int) -> tuple[Users, Users]:
    ids, labels = (tables.column(table, name) for name in ("writer_id", "character"))
    packed, mine = tables.column(table, "image"), rows_by(ids)
    train: Users = {}
    test: Users = {}
    for user in files.drawn(mine, writers):
        first, last = cut(mine[user], TRAINED)
        for part, rows in ((train, first), (test, last)):
            images = files.pictures([packed[i] for i in rows], "L", 28)
            part[user] = (images, [labels[i] for i in rows])
    return train, test


def users_of(paths: Iterable[Path]) -> Users:
    """Return the users of LEAF's JSON files: ``{"users": [...], "user_data": {user: {"x": …, "y": …}}}``.

    Raises ValueError, with the file, for another layout.
    """
    found: Users = {}
    for path in paths:
        try:
            data = json.loads(path.read_text())
            for user in data["users"]:
                found[user] = (data["user_data"][user]["x"], data["user_data"][user]["y"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not in LEAF's format ({type(error).__name__}: {error}); expected "
                '{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}'
            ) from error
    return found


def hdf5_users(path: Path) -> list[str]:
    """Return the users of a file of TFF's; ImportError without h5py, ValueError for another layout."""
    with _opened(path) as file:
        return list(file["examples"])


def hdf5(path: Path, users: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (user, columns) of those of the users that a file of TFF's has: ``examples/USER/COLUMN``."""
    with _opened(path) as file:
        for user in users:
            if user in file["examples"]:
                columns = file["examples"][user]
                yield user, {name: columns[name][()] for name in columns}


def _opened(path: Path) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise missing_extra("h5py", f"reading {path.name}", "hdf5") from error
    file = h5py.File(path, "r")
    if "examples" not in file:
        file.close()
        raise ValueError(f"{path} has no group 'examples'; expected TFF's examples/USER/COLUMN")
    return file


def rows_by(ids: Iterable[Any]) -> dict[str, list[int]]:
    """Return user -> the rows that are theirs, in order."""
    rows: dict[str, list[int]] = {}
    for i, user in enumerate(ids):
        rows.setdefault(str(user), []).append(i)
    return rows


def cut(rows: list[int], share: float) -> tuple[list[int], list[int]]:
    """Return the first `share` of the rows and the rest, each of at least one where there are two."""
    first = min(max(int(len(rows) * share), 1), max(len(rows) - 1, 1))
    return rows[:first], rows[first:]
