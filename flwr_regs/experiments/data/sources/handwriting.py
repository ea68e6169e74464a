"""FEMNIST by writer, from LEAF's JSON, TFF's HDF5 or the hub's parquet."""

from __future__ import annotations

from typing import Any

import numpy as np

from flwr_regs.experiments.data.sources import data_files as files
from flwr_regs.experiments.data.sources.data_files import Array, Parts, Users

TRAINED = 0.9
"""The share of a writer's examples that trains, where the files have no test split: LEAF's, TFF's too."""


def femnist(data_dir: str, writers: int, hub: bool) -> Parts:
    """Return FEMNIST (Caldas et al. 2018) in [0, 1], 28 x 28, 62 classes; groups are the writers.

    Paper is 1 and ink 0, as in LEAF and TFF. `writers` keeps so many of them, drawn from seed 0. From
    TFF's ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``, LEAF's ``train/*.json`` and ``test/*.json``,
    or the hub's ``*.parquet`` (`hub` downloads them), of which the last tenth of a writer's examples is
    for testing.
    """
    folders = ("", "femnist", "femnist/data")
    h5 = files.matching(data_dir, folders, "fed_emnist_train.h5", "fed_emnist_test.h5")
    leaf = files.matching(data_dir, folders, "train/*.json", "test/*.json")
    parquet = files.matching(data_dir, folders, "*.parquet")
    if hub:
        train, test = _of_table(files.downloaded("flwrlabs/femnist", "train"), writers)
    elif h5:
        (first,), (last,) = h5
        users = files.drawn(files.hdf5(first), writers)
        train, test = (
            {user: (of["pixels"], of["label"]) for user, of in files.hdf5(path, users).items()}
            for path in (first, last)
        )
    elif leaf:
        train, test = map(files.users_of, leaf)
        train = {user: train[user] for user in files.drawn(train, writers)}
    elif parquet:
        train, test = _of_table(files.table_of(parquet[0]), writers)
    else:
        raise files.Missing
    if writers:  # without, test writers may be others: LEAF can also split by writer
        test = {user: of for user, of in test.items() if user in train}

    def convert(of: tuple[Any, Any]) -> tuple[Array, Array]:
        return np.asarray(of[0], np.float32).reshape(-1, 1, 28, 28), np.ravel(np.asarray(of[1]))

    return files.by_group(train, test, convert)


def _of_table(table: Any, writers: int) -> list[Users]:
    users = np.array(files.column(table, "writer_id"), str)
    labels, packed = (np.array(files.column(table, name)) for name in ("character", "image"))
    parts: list[Users] = [{}, {}]
    for user in files.drawn(set(users.tolist()), writers):
        rows = np.flatnonzero(users == user)
        for part, chosen in zip(parts, files.cut(rows, TRAINED), strict=True):
            part[user] = files.pictures([*packed[chosen]], "L", 28), labels[chosen]
    return parts
