"""The user's files: where they are looked for, and what several sources have: pictures, tables, users."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.extras import needed

Array = np.ndarray[Any, Any]
Parts = dict[str, Any]
"""The fields of :class:`flwr_regs.experiments.data.datasets.Data`, by name."""
Groups = Mapping[Any, Any]
"""Group -> what its inputs and labels are made of."""
Users = dict[str, tuple[Any, Any]]
"""User -> (inputs, labels), as a file has them."""

LEAFS = """LEAF's {"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}"""
DOWNLOADS = "~/.cache/flwr_regs"


class Missing(Exception):
    """A data set's files are not there; its text adds to what the catalogue says of them."""


@contextmanager
def reading(what: Any, expected: str = "") -> Iterator[None]:
    """Raise what goes wrong within as a ValueError that names a file, and what is `expected` of it.

    What says itself which file or package is missing stays as it is.
    """
    try:
        yield
    except (Missing, FileNotFoundError, ImportError, MemoryError):
        raise
    except Exception as error:  # the libraries that read damaged files may raise anything
        kind = "" if type(error) is ValueError else type(error).__name__
        why = ": ".join(filter(None, (kind, " ".join(str(error).split()).rstrip("."))))
        hint = f"; expected {expected}" if expected and "expected" not in why else ""
        raise ValueError(f"{what}: {why}{hint}") from error


def root(data_dir: str) -> Path:
    """Return the folder of a data-dir; empty: the one that downloads go to."""
    return Path(data_dir or DOWNLOADS).expanduser()


def matching(data_dir: str, folders: Iterable[str], *patterns: str) -> list[list[Path]] | None:
    """Return the files of each pattern, sorted, from the first folder that has some of each; else None.

    `folders` are relative to the data-dir; "" is the data-dir itself.
    """
    places = (root(data_dir) / folder for folder in folders)
    every = ([sorted(place.glob(pattern)) for pattern in patterns] for place in places)
    return next(filter(all, every), None)


def one_of_each(data_dir: str, folders: Iterable[str], *names: str) -> list[Path]:
    """Return the files of these names, from the first folder that has them; `Missing` without them."""
    if not (found := matching(data_dir, folders, *names)):
        gone = (name for name in names if not (root(data_dir) / name).exists())
        raise Missing(f"{len(names)} files such as {next(gone, names[0])}")
    return [file for (file,) in found]


def inside(folder: Path, name: str) -> Path:
    """Return a file that a list names, relative to a folder; ValueError if it lies outside of it."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"a list in {folder} names '{name}', which is outside of this folder")
    return folder / path


def pictures(sources: Sequence[Any], mode: str, size: int, centre: float = 1.0) -> Array:
    """Return pictures as float32 in [0, 1], ``(n, channels, size, size)``.

    Parameters
    ----------
    sources : a file, its bytes, or pixels in bytes, ``(height, width[, 3])``, for each picture
    mode : str
        Pillow's: ``"L"`` for grey, ``"RGB"``.
    size : int
        They are scaled to a square of it. Pixels between are linear, with antialiasing.
    centre : float
        The part of height and width that is kept, in the middle.

    Raises `Missing` if one of the files is not there.
    """
    Image = needed("PIL.Image", "torchvision", "reading pictures")
    if size < 1:
        raise ValueError(f"size must be at least 1, not {size}")
    if gone := [of for of in sources if isinstance(of, Path) and not of.is_file()]:
        many = f"{len(sources)} pictures, of which {len(gone)} are missing"
        raise Missing(f"{many}, such as {gone[0]}")
    out = np.empty((len(sources), 1 if mode == "L" else 3, size, size), np.float32)
    for number, (pixels, source) in enumerate(zip(out, sources, strict=True)):
        which = source if isinstance(source, Path) else f"picture {number}"
        with reading(which, "a picture with values from 0 to 255"):
            if isinstance(source, np.ndarray):
                image = Image.fromarray(source)
            else:
                image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
            with image:
                if image.mode[0] in "IF":  # Pillow would cut all that is above 255
                    raise ValueError(f"it is of mode {image.mode}")
                left, top = (int(edge * (1 - centre) / 2) for edge in image.size)
                width, height = image.size
                plain = image.convert(mode).crop((left, top, width - left, height - top))
                plain = plain.resize((size, size), Image.Resampling.BILINEAR)
                pixels[:] = np.atleast_3d(np.asarray(plain)).transpose(2, 0, 1)
    out /= 255
    return out


def parts_of(train: tuple[Array, Array], test: tuple[Array, Array]) -> Parts:
    """Return (inputs, labels) for training and for testing as the fields of a data set."""
    return {"train_x": train[0], "train_y": train[1], "test_x": test[0], "test_y": test[1]}


def by_group(train: Groups, test: Groups, convert: Callable[[Any], Any] = lambda of: of) -> Parts:
    """Return groups' examples in order of the groups' names, as one data set.

    Parameters
    ----------
    train, test : mapping
        Group -> what `convert` makes inputs and labels of. The two may differ in their groups.
    """
    names = sorted({*train, *test})

    def pair(part: str, name: Any, of: Any) -> tuple[Array, Array]:
        with reading(f"the {part} data of {name}", "inputs of one shape, and a label for each"):
            x, y = convert(of)
            if len(x) != len(y):
                raise ValueError(f"there are {len(x)} inputs, but {len(y)} labels")
        return x, y

    def joined(part: str, groups: Groups) -> tuple[tuple[Array, Array], Array]:
        pairs = {i: pair(part, n, groups[n]) for i, n in enumerate(names) if n in groups}
        pairs = {i: pair for i, pair in pairs.items() if len(pair[1])}
        if not pairs:
            raise ValueError(f"the {part} data has no examples")
        x, y = map(np.concatenate, zip(*pairs.values(), strict=True))
        return (x, y), np.repeat([*pairs], [len(y) for _, y in pairs.values()])

    (first, of_first), (last, of_last) = joined("train", train), joined("test", test)
    return {**parts_of(first, last), "groups": of_first, "test_groups": of_last}


def cut(rows: Any, share: float) -> tuple[Any, Any]:
    """Return the first `share` of the rows and the rest, each of at least one where there are two."""
    first = min(max(int(len(rows) * share), 1), max(len(rows) - 1, 1))
    return rows[:first], rows[first:]


def drawn(names: Iterable[str], count: int) -> list[str]:
    """Return `count` of the names, drawn from seed 0, in order; 0: all; ValueError if there are fewer."""
    every = sorted(names)
    if count > len(every):
        raise ValueError(f"there are {len(every)} users, but {count} are asked for")
    chosen = np.random.default_rng(0).choice(every, count, replace=False)
    return sorted(chosen.tolist()) if count else every


def leaf(data_dir: str, folders: Iterable[str]) -> list[Users]:
    """Return the users of LEAF's ``train/*.json`` and of its ``test/*.json``; [] without these files.

    They are ``{"users": [...], "user_data": {user: {"x": …, "y": …}}}``. Raises ValueError, with the file,
    for another layout.
    """
    return [*map(_users_of, matching(data_dir, folders, "train/*.json", "test/*.json") or ())]


def _users_of(paths: Iterable[Path]) -> Users:
    users: Users = {}
    for path in paths:
        with reading(path, LEAFS):
            data = json.loads(path.read_text(encoding="utf-8"))
            for user in data["users"]:
                x, y = (data["user_data"][user][part] for part in "xy")
                if len(x) != len(y):
                    raise ValueError(f"user {user} has {len(x)} x, but {len(y)} y")
                users[user] = x, y
    return users


def hdf5(train: Path, test: Path, count: int, *columns: str) -> list[dict[str, tuple[Any, ...]]]:
    """Return user -> some columns of TFF's two files, ``examples/USER/COLUMN``.

    The users are `count` of those that train, drawn as :func:`drawn` does, and in the test file those of
    them that it has. Raises ImportError without h5py, ValueError for another layout.
    """
    h5py = needed("h5py", "h5py", f"reading {train.name}", "hdf5")
    users: list[str] = []
    parts = []
    for path in (train, test):
        layout = f"TFF's examples/USER/ with {' and '.join(columns)}"
        with reading(path, layout), h5py.File(path, "r") as file:
            examples = file["examples"]
            users = users or drawn(examples, count)
            there = [user for user in users if user in examples]
            parts.append({u: tuple(examples[u][name][()] for name in columns) for u in there})
    return parts


def tables(data_dir: str, folders: Sequence[str], name: str, **splits: str) -> list[Any]:
    """Return splits of a data set of the hub: split -> its parquet files; no `folders`: it is downloaded.

    Raises `Missing` without files of each split, ImportError without what reads or downloads them.
    """
    paths = matching(data_dir, folders, *splits.values()) or []
    if folders and not paths:
        raise Missing
    import pandas as pd  # pictures of other files need not wait for it

    if not folders:
        datasets = needed("datasets", "flwr-datasets", f"downloading '{name}'", "fds")
        whole = {split: datasets.load_dataset(name, split=split).to_pandas() for split in splits}
        return [pd.concat({split: table}) for split, table in whole.items()]
    needed("pyarrow", "pyarrow", "reading parquet files")

    def table(path: Path) -> Any:
        with reading(path, "a parquet file"):
            return pd.read_parquet(path)

    return [pd.concat({path: table(path) for path in files}) for files in paths]


def column(table: Any, *names: str) -> list[Any]:
    """Return the first of these columns that a table has; pictures as their bytes, still packed.

    Raises ValueError, with the columns that there are, if it has none of them, or with the row that lacks
    a value.
    """
    for name in names:
        if name in table:
            values = [v["bytes"] if isinstance(v, dict) else v for v in table[name].tolist()]
            if none := [i for i, v in enumerate(values) if v is None or v != v]:
                path, row = table.index[none[0]]
                raise ValueError(f"{path}: row {row} has no '{name}'; expected one in each row")
            return values
    raise ValueError(f"a table has the columns {', '.join(table)}; expected {' or '.join(names)}")
