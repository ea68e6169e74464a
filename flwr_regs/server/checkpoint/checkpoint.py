"""Checkpoints on the disk: a file for each, written as a whole or not at all, and checked when read.

``round-000012`` is the SHA-256 of the rest, a line end, and a safetensors file, in which are as bytes

| ``manifest`` | kind, format, round, versions                                |
| ``state``    | what the server keeps between rounds                         |
| ``history``  | the history, a line for each round                           |

and, under names of their own, the arrays and bytes of the state. What is left of it is JSON, which holds
None, booleans, integers, floats (NaN and infinity as Python's json writes them), texts, lists, and dicts
with texts as keys. Everything else is an object with one key, its tag: ``{"$tuple": [...]}``. No pickle.

A file is written beside its place,
synced, and then moved there: a crash leaves the checkpoints that were there. The last two are kept. A lock
keeps a second run out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.wire.arrays import pack, unpack
from flwr_regs.wire.files import claim, write_atomically
from flwr_regs.wire.npy import PLAIN

LOG = logging.getLogger("flwr")
KIND = "flwr_regs checkpoint"
FORMAT = 1
"""Version of the layout above; newer ones are refused. All have the digest and a manifest."""
KEPT = 2
MANIFEST, STATE, HISTORY = "manifest", "state", "history"
Entry = Mapping[str, Any]
Store = dict[str, np.ndarray]
"""The arrays and bytes of values, equal ones once: digest -> array."""
_NAME = re.compile(r"round-(\d{6,})")


class CheckpointError(ValueError):
    """A folder that cannot be resumed from, or that checkpoints cannot be written into."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not as it was written."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read.

    Attributes
    ----------
    path, round : Path, int
        Its file, and the last round that it holds.
    state, history : dict, list of dict
    versions : dict of str to str
        Library -> its version when this was written.
    """

    path: Path
    round: int
    state: dict[str, Any]
    history: list[dict[str, Any]]
    versions: dict[str, str]


@cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries that a run's bits depend on."""
    installed = {}
    for name in ("flwr-regs", "flwr", "torch", "numpy"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def latest(folder: str | os.PathLike[str]) -> Checkpoint:
    """Return the newest checkpoint of a folder, or the one that `folder` itself is.

    If the newest one is damaged, a warning says so, and the one before is returned.

    Raises
    ------
    CheckpointError
        No such folder, no checkpoint in it, one of a newer format, or none that is not damaged.
    """
    path = Path(folder)
    if path.is_file():
        return read(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: there is no checkpoint to resume from")
    try:
        checkpoints, names = rounds_in(path), os.listdir(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not checkpoints:
        others = sorted(n for n in names if not n.startswith("."))
        only = ", ".join(others[:3]) + ", …" * (len(others) > 3)
        holds = f"only {only}" if others else "it is empty"
        raise CheckpointError(f"{path} holds no checkpoint such as round-000012, {holds}")
    damaged: list[str] = []
    for number in sorted(checkpoints, reverse=True):
        try:
            checkpoint = read(checkpoints[number])
        except DamagedCheckpoint as error:
            damaged.append(str(error))
        else:
            for why in damaged:
                LOG.warning("%s; going back to %s", why, checkpoint.path.name)
            return checkpoint
    raise CheckpointError("; ".join(damaged))


def rounds_in(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder by their rounds, damaged ones too."""
    named = {path: _NAME.fullmatch(path.name) for path in folder.iterdir()}
    return {int(match[1]): path for path, match in named.items() if match}


def read(path: Path) -> Checkpoint:
    """Return one checkpoint.

    Raises CheckpointError if it is of a newer format, and DamagedCheckpoint if it is not as it was written.
    """
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error.strerror}") from error
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedCheckpoint(f"{path} is damaged: its bytes are not those that were written")
    try:
        return _parsed(path, unpack(body))
    except CheckpointError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: it holds no checkpoint") from error


def _parsed(path: Path, arrays: dict[str, np.ndarray]) -> Checkpoint:
    """Return what the parts of a file hold; raise whatever a file of another kind makes it raise."""
    manifest = json.loads(arrays.pop(MANIFEST).tobytes())
    if manifest["kind"] != KIND:
        raise CheckpointError(f"{path} is a {manifest['kind']!r:.40}, not a {KIND!r}")
    if manifest["format"] > FORMAT:
        by = manifest["versions"].get("flwr-regs")
        newer = f"{path} has format {manifest['format']}, written by flwr_regs {by}"
        raise CheckpointError(f"{newer}; this version reads formats up to {FORMAT}")
    number, match = manifest["round"], _NAME.fullmatch(path.name)
    if match and int(match[1]) != number:
        raise DamagedCheckpoint(f"{path} is damaged: it holds round {number}")
    state, history = (arrays.pop(name).tobytes() for name in (STATE, HISTORY))
    entries = [from_json(json.loads(line), {}) for line in history.splitlines()]
    held = from_json(json.loads(state), arrays)
    return Checkpoint(path, number, held, entries, manifest["versions"])


def written(content: Entry, arrays: Mapping[str, np.ndarray]) -> tuple[bytes, bytes]:
    """Return a checkpoint's bytes, in two parts: `content` has its three texts by name."""
    texts = {name: np.frombuffer(text.encode(), np.uint8) for name, text in content.items()}
    body = pack({**arrays, **texts})
    return f"{hashlib.sha256(body).hexdigest()}\n".encode(), body


class Folder:
    """A folder that one run writes its checkpoints into.

    Parameters
    ----------
    path : path
    resumed : Checkpoint, optional
        What the run goes on from.

    Raises
    ------
    CheckpointError
        The folder cannot be written, another run writes into it, or it holds a checkpoint that is not what
        this run goes on from.
    """

    def __init__(self, path: str | os.PathLike[str], resumed: Checkpoint | None = None) -> None:
        self.path = Path(path)
        self._lines: list[str] = []  # of the history's finished entries
        try:
            with ExitStack() as on_error:
                self.path.mkdir(parents=True, exist_ok=True)
                on_error.callback(claim(self.path / ".lock"))
                for left in self.path.glob(".round-*.part"):  # of a crash
                    left.unlink()
                self._set_aside(resumed)
                self._lock = on_error.pop_all()
        except BlockingIOError as error:
            other = f"another run ({error}) writes its checkpoints into {self.path}"
            own = "give each run a folder of its own"
            raise CheckpointError(f"checkpoint_dir: {other}; {own}") from None
        except OSError as error:
            why = f"{self.path} cannot be written ({error.strerror or error})"
            raise CheckpointError(f"checkpoint_dir: {why}") from error

    def save(self, number: int, state: Entry, history: Sequence[Entry]) -> Path:
        """Write the checkpoint of a round, and keep the last two; return its file.

        Raises OSError if it cannot be written, and TypeError for a value that cannot be kept. The
        checkpoints that were there are then still there.
        """
        store: Store = {}
        text = json.dumps(to_json(state, store, "the state"))
        lines = self._lines[: len(history)]
        for i in range(len(lines), len(history)):
            none: Store = {}
            lines.append(json.dumps(to_json(history[i], none, f"the history of entry {i}")))
            if none:
                raise TypeError(f"the history of entry {i} holds arrays or bytes")
        manifest = {"kind": KIND, "format": FORMAT, "round": number, "versions": versions()}
        content = {MANIFEST: json.dumps(manifest), STATE: text, HISTORY: "\n".join(lines)}
        place = self.path / f"round-{number:06d}"
        self._lines = lines[:-1]  # the last entry may still change
        write_atomically(place, written(content, store))
        with suppress(OSError):  # what cannot be removed now is removed later
            checkpoints = rounds_in(self.path)
            for older in sorted(checkpoints)[:-KEPT]:
                checkpoints[older].unlink()
        return place

    def close(self) -> None:
        """Let another run write into the folder."""
        self._lock.close()

    def _set_aside(self, resumed: Checkpoint | None) -> None:
        """Raise CheckpointError for checkpoints that this run does not go on from; rename damaged ones."""
        checkpoints = rounds_in(self.path)
        if not checkpoints:
            return
        names = ", ".join(sorted(p.name for p in checkpoints.values()))
        holds, other = f"checkpoint_dir: {self.path} holds", "or name another folder"
        if resumed is None:
            again = f"start(..., resume_from={str(self.path)!r})"
            raise CheckpointError(f"{holds} checkpoints ({names}): go on with {again}, {other}")
        if resumed.path.parent.resolve() != self.path.resolve():
            which = f"({names}) of another run than {resumed.path}"
            raise CheckpointError(f"{holds} checkpoints {which}: resume from them, {other}")
        for path in [path for number, path in checkpoints.items() if number > resumed.round]:
            try:
                read(path)
            except DamagedCheckpoint:
                os.rename(path, self.path / f"damaged-{path.name}-{os.getpid()}")
            else:
                later = f"{path.name}, which is later than {resumed.path.name}"
                raise CheckpointError(f"{holds} {later}: resume from it, {other}")


# values


def to_json(value: Any, store: Store, where: str = "the value") -> Any:
    """Return a value as JSON can hold it; its arrays and bytes go to `store`.

    Raises TypeError naming the place of a value that cannot be kept, such as a function.
    """
    if isinstance(value, np.generic | np.ndarray) and value.dtype in PLAIN:  # which safetensors has
        if isinstance(value, np.generic):
            return {"$scalar": _stored(value, store)}
        # sums depend on the order
        turned = value.flags.f_contiguous and not value.flags.c_contiguous
        return {"$array": [_stored(value.T, store), "T"] if turned else [_stored(value, store)]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {"$bytes": _stored(np.frombuffer(value, np.uint8), store)}
    if isinstance(value, list | tuple):
        items = [to_json(v, store, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, set | frozenset):
        items = [to_json(v, store, where) for v in value]
        return {f"${type(value).__name__}": sorted(items, key=repr)}  # equal sets, one order
    if isinstance(value, Mapping):
        pairs = [(k, to_json(v, store, f"{where}[{k!r}]")) for k, v in value.items()]
        if all(type(k) is str and not k.startswith("$") for k, _ in pairs):
            return dict(pairs)
        return {"$dict": [(to_json(k, store, where), v) for k, v in pairs]}
    can = "numbers, texts, bytes, arrays, and lists and dicts of these can be saved"
    raise TypeError(f"{where} is {value!r:.80} of type {type(value).__name__}; only {can}")


def from_json(value: Any, arrays: dict[str, Any]) -> Any:
    """Return the value that :func:`to_json` returned as `value`; mappings come back as dicts.

    Raises ValueError for what it never returns.
    """
    if isinstance(value, list):
        return [from_json(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {k: from_json(v, arrays) for k, v in value.items()}
    try:
        ((tag, content),) = value.items()
        return _TAGS[tag](content, arrays)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{value!r:.80} is no value") from error


def _stored(value: Any, store: Store) -> str:
    """Put an array into the store; return its name there."""
    array = np.asarray(value, order="C")
    digest = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=16)
    digest.update(array.reshape(-1).view(np.uint8).data)
    store[name := digest.hexdigest()] = array
    return name


def _read_array(parts: Any, arrays: dict[str, Any]) -> np.ndarray:
    name, *turned = parts
    array = np.array(arrays[name])
    return array.T if turned else array


_TAGS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "$bytes": lambda v, arrays: arrays[v].tobytes(),
    "$tuple": lambda v, arrays: tuple(from_json(v, arrays)),
    "$set": lambda v, arrays: set(from_json(v, arrays)),
    "$frozenset": lambda v, arrays: frozenset(from_json(v, arrays)),
    "$dict": lambda v, arrays: {from_json(k, arrays): from_json(x, arrays) for k, x in v},
    "$array": _read_array,
    "$scalar": lambda v, arrays: arrays[v][()],
}
