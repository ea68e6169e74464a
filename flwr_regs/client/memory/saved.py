"""A client's private entries and slots on its own disk, so that they outlive the node and the run.

``<folder>/partition-<id>/<start id>/round-<number>.safetensors`` holds what the client kept after a round,
in full; its metadata say which round of which method, and have a digest. The last two rounds are there: a
server that repeats the last one gets the client as it was before. Each file is written beside its place,
synced and then moved there, so that a crash leaves the old ones. Files of earlier trainings stay.

Beside them, ``personal.safetensors`` holds the client's own model where its method makes one (Ditto), or an
evaluation does (calibration): whole, for its user. No round reads it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor

from flwr_regs.abilities import Personalises
from flwr_regs.chain import Chain
from flwr_regs.client.memory.state import NO_ROUND, ClientState
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, ProtocolError, digest, pack, unpack
from flwr_regs.wire.errors import described
from flwr_regs.wire.files import write_atomically

LOG = logging.getLogger("flwr")
Folder = str | os.PathLike[str] | None
FORMAT = 1
KEPT = 2
"""Rounds whose files stay."""
ENTRY = "flwr_regs"
_FILE = re.compile(r"round-(\d{6,})\.safetensors")
_OWN_MODEL = "personal.safetensors"
_PERSONAL = "personal"


@dataclass(frozen=True)
class Generation:
    """What a client kept after one exchange.

    Attributes
    ----------
    method : str
    round, probe : int, bool
        The exchange: the round's number, and whether it was its probe.
    earlier : int
        The round before it that this client trained, whose file was there before; -1: none.
    slots : dict of str to bytes
        Name, such as ``"<term>.client"`` -> arrays, packed.
    """

    method: str
    round: int
    probe: bool
    earlier: int
    slots: dict[str, bytes]

    def write(self, path: Path) -> None:
        """Write the file; raise OSError."""
        arrays = {f"{s}/{n}": a for s, data in self.slots.items() for n, a in unpack(data).items()}
        said = {k: getattr(self, k) for k in ("method", "round", "probe", "earlier")}
        said |= {"format": FORMAT, "slots": sorted(self.slots)}
        said["digest"] = _digest(said, arrays)
        data = safetensors.numpy.save(arrays, {ENTRY: json.dumps(said)})
        write_atomically(path, [data])

    @classmethod
    def read(cls, path: Path) -> Generation:
        """Read a file; raise OSError, or ValueError for one that is damaged or of another format."""
        data = path.read_bytes()
        try:
            size = int.from_bytes(data[:8], "little")
            said = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][ENTRY])
            arrays = safetensors.numpy.load(data)
            if said.pop("digest") != _digest(said, arrays):
                raise ValueError("its digest differs")
            if said.pop("format") != FORMAT:
                raise ValueError("it is of another format")
            found: dict[str, NDArrays] = {slot: {} for slot in said.pop("slots")}
            for key, a in arrays.items():
                slot = next(s for s in found if key.startswith(f"{s}/"))
                found[slot][key[len(slot) + 1 :]] = a
            return cls(**said, slots={slot: pack(a) for slot, a in found.items()})
        except Exception as error:  # whatever the bytes make json or safetensors raise
            raise ValueError(f"the file {path} cannot be read: {described(error)}") from error


class Saved:
    """A client's files of one training, in one round or evaluation of it.

    Parameters
    ----------
    folder : str or path
        The same for all clients of a machine.
    config : mapping
        The message's config: the partition id and the start id name the files. Raises ProtocolError for ids
        that cannot.

    Attributes
    ----------
    config : dict
        `config`; with the saved slots if the node holds nothing of this training.
    lost : bool
        Whether there were slots once that are not there now.
    """

    def __init__(self, folder: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
        pid, start = config.get(keys.CLIENT_KEY), config.get(keys.START_KEY)
        if not isinstance(pid, int) or isinstance(pid, bool) or pid < 0 or not keys.is_start(start):
            raise ProtocolError(
                f"save_private needs a partition id and a start id to name its files, but got {pid!r:.80} "
                f"and {start!r:.80}"
            )
        self._root = Path(folder)
        self._folder = self._root / f"partition-{pid}" / str(start)
        self._method = str(config.get(keys.METHOD_KEY))
        self._number, self._probing = config[keys.ROUND_KEY], bool(config.get(keys.PROBE_KEY))
        self.config, self.lost = dict(config), False
        self._earlier, self._loaded = config.get(keys.LAST_KEY, NO_ROUND), False

    def entering(self) -> None:
        """Load what this client kept before this round, if the node holds nothing.

        In a round that has begun with a probe, that is what the probe kept.
        """
        if keys.LAST_KEY in self.config:
            return
        try:
            found = self._before()
        except (OSError, ValueError) as error:
            LOG.warning("this client's saved state is lost: %s", error)
            self.lost = True
            return
        if found is None:
            return
        began_here = found.round == self._number
        self._earlier, self._loaded = found.earlier if began_here else found.round, True
        self.lost = self.config.get(keys.USED_KEY, NO_ROUND) > found.round
        self.config |= found.slots

    def evaluating(self) -> None:
        """Load what this client kept after its last round, if the node holds nothing."""
        if keys.LAST_KEY in self.config:
            return
        try:
            if files := _by_round(self._folder):
                self.config |= self._read(files, max(files)).slots
        except (OSError, ValueError) as error:
            LOG.warning("this client's saved state is lost: %s", error)
            self.lost = True

    def leaving(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """Write what the node keeps of a reply; return the entries that this adds to the reply.

        It takes the place of what was written of this round and of later ones: the server repeats them. A
        disk that is full or read-only costs a warning.
        """
        slots = {k: v for k, v in reply.items() if k.endswith(".client") and isinstance(v, bytes)}
        slots.pop(keys.MODEL_KEY, None)  # the server sends it again
        number = self._number
        new = Generation(self._method, number, self._probing, self._earlier, slots)
        loaded = {keys.LOADED_KEY: True} if self._loaded else {}
        try:
            files = _by_round(self._folder)
            if slots or files:
                self._make_folder()
                new.write(self._folder / f"round-{number:06d}.safetensors")
            older = [n for n in files if n < number]
            for n, path in files.items():
                if n > number or n in older[: 1 - KEPT]:
                    path.unlink()
        except OSError as error:
            LOG.warning("this client's state is not on the disk: %s", described(error))
            return {**loaded, keys.UNSAVED_KEY: True}
        return loaded

    def keep_personal(self, arrays: NDArrays) -> dict[str, Any]:
        """Write the client's own model, as this round or evaluation leaves it; return as `leaving` does."""
        slots = {_PERSONAL: pack(arrays)}
        own = Generation(self._method, self._number, False, NO_ROUND, slots)
        try:
            self._make_folder()
            own.write(self._folder / _OWN_MODEL)
        except OSError as error:
            LOG.warning("this client's own model is not on the disk: %s", described(error))
            return {keys.UNSAVED_KEY: True}
        return {}

    def _make_folder(self) -> None:
        for folder in (self._root, self._folder.parent, self._folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _before(self) -> Generation | None:
        """Return what this client kept before this round; raise ValueError if there was more than that."""
        files, number = _by_round(self._folder), self._number
        for n in sorted(files, reverse=True):
            if n < number or (n == number and not self._probing):
                found = self._read(files, n)
                if n < number or found.probe:
                    return found
        if files and self._read(files, min(files)).earlier != NO_ROUND:
            raise ValueError(f"{self._folder} goes back to round {min(files)}, not before {number}")
        return None

    def _read(self, files: Mapping[int, Path], number: int) -> Generation:
        path = files[number]
        found = Generation.read(path)
        if (found.method, found.round) != (self._method, number):
            what = f"round {found.round} of {found.method}"
            raise ValueError(
                f"the file {path} is of {what}, not of round {number} of {self._method}"
            )
        return found


def evaluated_state(
    term: Chain, names: Iterable[str], folder: Folder, config: Mapping[str, Any]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return (an evaluate config with what this client saved, if the node holds nothing; what is missing).

    What is missing are entries of the reply: private entries and slots that a client which never trained
    does not have either. The server knows which. `names` are the model's.
    """
    if folder is not None and keys.START_KEY in config:
        saved = Saved(folder, config)
        saved.evaluating()
        config = saved.config
    missing: dict[str, Any] = {}
    if term.private(list(names)) and keys.PRIVATE_KEY not in config:
        missing[keys.FRESH_KEY] = True
    personal = any(isinstance(t, Personalises) for t in term.terms)
    if personal and not ClientState.read(term, config).latest(term):
        missing[keys.LOST_KEY] = True
    return config, missing


def load_private(
    folder: str | os.PathLike[str], partition: int, training: str | None = None
) -> dict[str, Tensor]:
    """Return a client's own part of the model, as its ``save_private=folder`` left it.

    ``model.load_state_dict(load_private(folder, 3), strict=False)`` puts it into a model that holds the
    global one. It is the client's private entries (FedBN, FedPer), or, of a method or evaluation that makes
    a model of the client's own (Ditto, APFL, FedAMP, FedBABU, calibration), that whole model: as it was
    evaluated last, or, if the client has trained since, as it was after that round.

    Parameters
    ----------
    folder : str or path
    partition : int
        The client's partition id.
    training : str, optional
        The name of one of the folders in ``<folder>/partition-<id>``. None: the one written last.

    Raises
    ------
    FileNotFoundError
        There is no such client or training.
    ValueError
        The file is damaged, or its method gives clients nothing of their own.
    """
    home = Path(folder) / f"partition-{int(partition)}"
    paths = {path.name: newest for path in home.glob("*") if (newest := _newest(path))}
    if not paths or (training is not None and training not in paths):
        wanted = "" if training is None else f", not {training!r}"
        raise FileNotFoundError(f"{home} has the trainings {sorted(paths)}{wanted}")
    latest = max(paths, key=lambda name: max(p.stat().st_mtime for p in paths[name]))
    files = {path: Generation.read(path) for path in paths[training or latest]}
    for found in sorted(files.values(), key=lambda f: (f.round, _PERSONAL in f.slots))[::-1]:
        for slot in (_PERSONAL, keys.PRIVATE_KEY):
            if slot in found.slots:
                return {n: torch.from_numpy(a) for n, a in unpack(found.slots[slot]).items()}
    path, found = files.popitem()
    raise ValueError(f"{path}: clients of {found.method} keep no entries of the model")


def _newest(folder: Path) -> list[Path]:
    """Return a training's last round, and the client's own model, where these are there."""
    files, own = _by_round(folder), folder / _OWN_MODEL
    return [*([files[max(files)]] if files else []), *([own] if own.is_file() else [])]


def _by_round(folder: Path) -> dict[int, Path]:
    """Return a training's files by round, in order; raise OSError for a folder that cannot be read."""
    if not folder.is_dir():
        return {}
    named = {_FILE.fullmatch(path.name): path for path in folder.iterdir()}
    return dict(sorted((int(m[1]), path) for m, path in named.items() if m))


def _digest(said: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    text = json.dumps([dict(said), digest(arrays)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
