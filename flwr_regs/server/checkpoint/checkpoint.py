"""Checkpoints on the disk: a folder for each, written as a whole or not at all, and checked when read.

| file                   | what it holds                                                              |
| ``state.json``         | what the server keeps between rounds, as values.py writes it               |
| ``history.jsonl``      | the history, a line for each round                                         |
| ``arrays.safetensors`` | the arrays and bytes of the state                                          |
| ``manifest.json``      | format, round, versions; sizes and SHA-256 of the others, and of itself    |

A checkpoint is written into a folder beside its place, synced, and then moved there. So a crash leaves the
checkpoints that were there. The last two are kept. A lock keeps a second run out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors.numpy

from flwr_regs.server.checkpoint.values import Store, from_json, to_json
from flwr_regs.wire.arrays import pack
from flwr_regs.wire.files import claim, sync_folder, write_synced

LOG = logging.getLogger("flwr")
KIND = "flwr_regs checkpoint"
FORMAT = 1
"""Version of the layout above; newer ones are refused."""
KEPT = 2
STATE, HISTORY, ARRAYS, MANIFEST = (
    *("state.json", "history.jsonl", "arrays.safetensors", "manifest.json"),
)
PART, OLD = ".part-", ".old-"
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
        Its folder, and the last round that it holds.
    state, history : dict, list of dict
    versions : dict of str to str
        Library -> its version when this was written.
    """

    path: Path
    round: int
    state: dict[str, Any]
    history: list[dict[str, Any]]
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """Return the versions of the libraries that a run's bits depend on."""
    installed = {}
    for name in ("flwr-regs", "flwr", "torch", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
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
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: there is no checkpoint to resume from")
    if _NAME.fullmatch(path.name) or (path / MANIFEST).exists():
        return read(path)
    try:
        checkpoints, names = rounds_in(path), os.listdir(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not checkpoints:
        others = sorted(n for n in names if not n.startswith("."))
        holds = f"only {', '.join(others[:3])}{', …' if len(others) > 3 else ''}"
        raise CheckpointError(
            f"{path} holds no checkpoint, {holds if others else 'it is empty'}; a checkpoint is a folder "
            "such as round-000012"
        )
    damaged = []
    for number in sorted(checkpoints, reverse=True):
        try:
            checkpoint = read(checkpoints[number])
        except DamagedCheckpoint as error:
            damaged.append(str(error))
            continue
        for why in damaged:
            LOG.warning("%s; going back to %s", why, checkpoint.path.name)
        return checkpoint
    raise CheckpointError("; ".join(damaged))


def rounds_in(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder by their rounds, damaged ones too.

    One that was moved away for a successor that never came counts: the process died between two moves.
    """
    checkpoints: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):  # ".old-" sorts first
        match = _NAME.fullmatch(path.name.removeprefix(OLD))
        if match and path.is_dir():
            checkpoints[int(match[1])] = path
    return checkpoints


def read(path: Path) -> Checkpoint:
    """Return one checkpoint.

    Raises CheckpointError if it is of a newer format, and DamagedCheckpoint if it is not as it was written.
    """
    manifest = _manifest(path)
    for name, (size, digest) in manifest["files"].items():
        try:
            with open(path / name, "rb") as file:
                held = hashlib.file_digest(file, "sha256").hexdigest()
                length = file.tell()
        except OSError as error:
            raise DamagedCheckpoint(f"{path} is damaged: {name}: {error.strerror}") from error
        if (length, held) != (size, digest):
            raise DamagedCheckpoint(
                f"{path} is damaged: {name} has {length:,} bytes, other ones than the {size:,} that were "
                "written"
            )
    try:
        arrays = safetensors.numpy.load_file(path / ARRAYS)
        state = from_json(json.loads((path / STATE).read_text()), arrays)
        lines = (path / HISTORY).read_text().split("\n")[:-1]
        history = [from_json(json.loads(line), {}) for line in lines]
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error
    return Checkpoint(path, manifest["round"], state, history, manifest["versions"])


def _manifest(path: Path) -> dict[str, Any]:
    try:
        text = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(
            f"{path} is damaged, or no checkpoint: {MANIFEST}: {error.strerror}"
        ) from error
    try:
        manifest = json.loads(text)
        if text != _sealed(manifest):
            raise ValueError
    except (ValueError, TypeError, AttributeError, RecursionError):
        why = f"{path} is damaged: {MANIFEST} is not as it was written"
        raise DamagedCheckpoint(why) from None
    if manifest["kind"] != KIND:
        raise CheckpointError(f"{path} is a {manifest['kind']!r}, not a {KIND!r}")
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, written by flwr_regs "
            f"{manifest['versions'].get('flwr-regs')}; this version reads formats up to {FORMAT}"
        )
    return manifest  # type: ignore[no-any-return]


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest's text, which ends with the digest of the rest. Every format keeps this."""
    rest = {k: v for k, v in manifest.items() if k != "digest"}
    digest = hashlib.sha256(json.dumps(rest).encode()).hexdigest()
    return (json.dumps({**rest, "digest": digest}, indent=1) + "\n").encode()


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
        self._release: Callable[[], None] | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._release = claim(self.path / ".lock")
            self._bring_back()
            for left in [*self.path.glob(f"{PART}*"), *self.path.glob(f"{OLD}*")]:  # of a crash
                shutil.rmtree(left)
            self._set_aside(resumed)
        except BlockingIOError as error:
            raise CheckpointError(
                f"checkpoint_dir: another run ({error}) writes its checkpoints into {self.path}; give each "
                "run a folder of its own"
            ) from None
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"checkpoint_dir: {self.path} cannot be written ({error.strerror or error})"
            ) from error
        except CheckpointError:
            self.close()
            raise

    def save(
        self, number: int, state: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
    ) -> Path:
        """Write the checkpoint of a round, and keep the last two; return its folder.

        Raises OSError if it cannot be written, and TypeError for a value that cannot be kept. The
        checkpoints that were there are then still there.
        """
        store: Store = {}
        text = json.dumps(to_json(state, store, "the state")).encode()
        lines = self._lines[: len(history)]
        for i in range(len(lines), len(history)):
            none: Store = {}
            lines.append(json.dumps(to_json(history[i], none, f"the history of entry {i}")))
            if none:
                raise TypeError(f"the history of entry {i} holds arrays or bytes")
        name = f"round-{number:06d}"
        part, old, place = (self.path / (begin + name) for begin in (PART, OLD, ""))
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(mode=0o700)
            files = {
                STATE: write_synced(part / STATE, [text]),
                HISTORY: write_synced(part / HISTORY, [f"{line}\n".encode() for line in lines]),
                ARRAYS: write_synced(part / ARRAYS, [pack(store)]),
            }
            manifest = {"kind": KIND, "format": FORMAT, "round": number, "versions": versions()}
            write_synced(part / MANIFEST, [_sealed({**manifest, "files": files})])
            sync_folder(part)
            if place.exists():  # resumed from one before, or ended by `on_round`
                os.rename(place, old)
            os.rename(part, place)
            sync_folder(self.path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            self._bring_back()
            raise
        self._lines = lines[:-1]  # the last entry may still change
        self._forget()
        return place

    def close(self) -> None:
        """Let another run write into the folder."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def _bring_back(self) -> None:
        """Put a checkpoint back whose successor has not come to its place."""
        with contextlib.suppress(OSError):
            for old in self.path.glob(f"{OLD}*"):
                place = self.path / old.name.removeprefix(OLD)
                if _NAME.fullmatch(place.name) and not place.exists():
                    os.rename(old, place)

    def _forget(self) -> None:
        """Remove all checkpoints but the last; what cannot be removed now is removed later."""
        with contextlib.suppress(OSError):
            checkpoints = rounds_in(self.path)
            older = [checkpoints[number] for number in sorted(checkpoints)[:-KEPT]]
            for path in [*older, *self.path.glob(f"{OLD}*")]:
                shutil.rmtree(path, ignore_errors=True)

    def _set_aside(self, resumed: Checkpoint | None) -> None:
        """Raise CheckpointError for checkpoints that this run does not go on from; rename damaged ones."""
        checkpoints = rounds_in(self.path)
        if not checkpoints:
            return
        names = ", ".join(sorted(p.name for p in checkpoints.values()))
        if resumed is None:
            raise CheckpointError(
                f"checkpoint_dir: {self.path} holds checkpoints ({names}): go on from them with "
                f"start(..., resume_from={str(self.path)!r}), or name another folder"
            )
        if resumed.path.parent.resolve() != self.path.resolve():
            raise CheckpointError(
                f"checkpoint_dir: {self.path} holds checkpoints ({names}) of another run than "
                f"{resumed.path}; name another folder"
            )
        for number, path in checkpoints.items():
            if number <= resumed.round:
                continue
            try:
                read(path)
            except DamagedCheckpoint:
                os.rename(path, self.path / f"damaged-{path.name}-{os.getpid()}")
                continue
            raise CheckpointError(
                f"checkpoint_dir: {self.path} holds {path.name}, which is later than {resumed.path.name}; "
                "resume from it, or name another folder"
            )
