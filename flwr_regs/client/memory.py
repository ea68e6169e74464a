"""What a client remembers between rounds, and where: one rule, stated by :func:`begin` and :func:`end`.

A snapshot is what a client keeps of one round, labelled by that round: the slots of its terms, and its
private entries. A message says two labels: `used`, the last round of this client whose reply the server
used, and `came`, the last one whose reply arrived; both in this course of the training, and 0 for none.

| part of a snapshot                           | a round begins with that of |
| slots of terms that keep ``"if-used"``       | `used`                      |
| slots that are kept ``"always"``; private    | `came`                      |

A snapshot that is not there is *lost*, and the reply says so. At its end, the client holds the snapshots
that the round began from, and its own. No more is needed. If the reply is not used, the next message has
the old `used`. If it is lost, or the server repeats the round, the next message has the old `came` too. A
term that corrects a reply which came and was not used (error feedback) says how: `unused`.

What a first exchange keeps belongs to its round alone, and has a label of its own.

A memory is a plain mapping of labels to snapshots. As bytes it lives in the node's ``Context.state``. With
``save_private=`` it is also in a :class:`Folder`: the same bytes, a file for each snapshot.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor

from flwr_regs.abilities import TakesBack
from flwr_regs.chain import Chain
from flwr_regs.hook_checks import checked_slot
from flwr_regs.term import Config, Slot
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, ProtocolError, digest, unpack
from flwr_regs.wire.errors import described
from flwr_regs.wire.files import write_atomically

LOG = logging.getLogger("flwr")
Memory = Mapping[str, "bytes | Unwritten"]
"""Label -> snapshot: as bytes, or not written yet, as long as it stays in one process."""
Root = str | os.PathLike[str] | None
PRIVATE = "regs"
"""In a snapshot, the name of the private entries beside those of terms; no term has it."""
NOTE = "flwr_regs"
FORMAT = 2
STATE, ENTRIES = "state", "private"
"""What a client keeps, or has lost, in its replies: slots of terms, private entries."""
PERSONAL = "personal"
NOT_WRITTEN = "this client's %s is not on the disk, in %s: %s"


def label(number: int, probe: bool = False) -> str:
    """Return a snapshot's label; labels sort by rounds."""
    return f"{'probe' if probe else 'round'}-{number:06d}"


@dataclass(frozen=True)
class Unwritten:
    """A snapshot in this process, which becomes bytes when something needs them.

    Attributes
    ----------
    slots : mapping
        By term, arrays that nothing writes into.
    method, label : str
    """

    slots: Mapping[str, NDArrays]
    method: str
    label: str

    @cached_property
    def data(self) -> bytes:
        """The snapshot as bytes."""
        return encode(self.slots, self.method, self.label)


def written(memory: Memory) -> dict[str, bytes]:
    """Return a memory with all its snapshots as bytes."""
    return {key: s.data if isinstance(s, Unwritten) else s for key, s in memory.items()}


@dataclass(frozen=True)
class Begun:
    """What a round begins with.

    Attributes
    ----------
    slots : Slot
        By term name; without empty ones.
    private : dict or None
        The private entries; None if there are none (yet).
    lost : list of str
        What the server counts on and is not there: `STATE`, `ENTRIES`.
    """

    slots: Slot = field(default_factory=dict)
    private: Slot | None = None
    lost: list[str] = field(default_factory=list)


def begin(memory: Memory, term: Chain, config: Config, withholds: bool = False) -> Begun:
    """Return what the round of `config` begins with, by the rule above.

    `withholds` is whether the client has private entries.
    """
    number, used, came = _course(config)
    if not memory and not came and not withholds and not _keeps_state(config):
        return Begun()
    settled = _snapshot(memory, used)
    latest = settled if came == used else _snapshot(memory, came)
    lost_state, slots = settled is None or latest is None, Slot()
    settled, held = settled or {}, latest or {}
    for t in term.terms:
        before, after = settled.get(t.name, {}), held.get(t.name, {})
        slots[t.name] = after if t.keeps == "always" else before
        if isinstance(t, TakesBack) and came > used and after:
            try:
                slots[t.name] = checked_slot(t.unused(before, after), t, "unused")
            except Exception as error:  # whatever a user's term raises
                LOG.warning("this client's state is lost: %s", described(error))
                slots[t.name], lost_state = {}, True
    if not config.get(keys.PROBE_KEY) and label(number, True) in memory:
        slots |= _snapshot(memory, number, True) or {}
    lost = _kinds(lost_state and _keeps_state(config), latest is None and withholds)
    return Begun({n: s for n, s in slots.items() if s}, held.get(PRIVATE), lost)


def end(
    memory: Memory, config: Config, slots: Slot, private: Any = None, method: str = ""
) -> dict[str, bytes | Unwritten]:
    """Return what the client remembers from now on: what its round began from, and what it leaves.

    Also a client that leaves nothing, but held something, or lost it, has a snapshot: that says that it is
    empty. What is lost stays lost, and is named again, until the server counts on a later round.
    """
    number, used, came = _course(config)
    if not memory and not came and not private and not any(slots.values()):
        return {}
    probe = bool(config.get(keys.PROBE_KEY))
    held = [label(used), label(came), *([] if probe else [label(number, True)])]
    held += [key for key in memory if probe and key.startswith("round")]
    kept = {key: memory[key] for key in sorted({*held}) if key in memory}
    if private or any(slots.values()) or ((memory or came) and not probe):
        snapshot = {n: s for n, s in {**slots, PRIVATE: private or {}}.items() if s}
        # in C order, as they are read again from bytes: torch's sums depend on it
        copies = {
            t: {n: np.array(to_numpy(a), order="C") for n, a in s.items()}
            for t, s in snapshot.items()
        }
        kept[label(number, probe)] = Unwritten(copies, method, label(number, probe))
    return kept


def kinds(config: Config, slots: Slot, private: Any) -> list[str]:
    """Return what a client that ends a round so keeps, for the server; a client that did goes on to."""
    return _kinds(_keeps_state(config) or any(slots.values()), private)


def _kinds(state: Any, entries: Any) -> list[str]:
    return [STATE] * bool(state) + [ENTRIES] * bool(entries)


def latest(memory: Memory, config: Config, withholds: bool = False) -> Begun:
    """Return what an evaluation sees: snapshot `came`, whatever the server made of that round's reply."""
    snapshot = _snapshot(memory, _course(config)[2])
    missing = snapshot is None
    lost = _kinds(missing and _keeps_state(config), missing and withholds)
    snapshot = snapshot or {}
    return Begun({n: s for n, s in snapshot.items() if n != PRIVATE}, snapshot.get(PRIVATE), lost)


def _course(config: Config) -> tuple[int, int, int]:
    """Return (the round, `used`, `came`) of a message."""
    *used, came = config.get(keys.SNAPSHOTS_KEY) or [0]
    return config.get(keys.ROUND_KEY, 0), used[0] if used else 0, came


def _keeps_state(config: Config) -> bool:
    """Whether the server knows that this client keeps slots of terms: it then names `used`, too."""
    return len(config.get(keys.SNAPSHOTS_KEY, ())) == 2


def _snapshot(memory: Memory, number: int, probe: bool = False) -> Slot | None:
    """Return the snapshot of a round; None if it is lost. That of round 0 is empty."""
    return _read(memory, label(number, probe)) if number else {}


def _read(memory: Memory, key: str) -> Slot | None:
    if (kept := memory.get(key)) is None:
        return None
    if isinstance(kept, Unwritten):
        return {t: {n: torch.from_numpy(a) for n, a in s.items()} for t, s in kept.slots.items()}
    try:
        return decode(kept)
    except ValueError as error:
        LOG.warning("this client's state is lost: %s", error)
        return None


def encode(snapshot: Mapping[str, Any], method: str = "", key: str = "") -> bytes:
    """Return a snapshot as safetensors bytes, which say whose they are and have a digest."""
    arrays = {f"{t}.{n}": to_numpy(a) for t, slot in snapshot.items() for n, a in slot.items()}
    arrays = {n: np.asarray(a, order="C") for n, a in arrays.items()}
    note = {"format": FORMAT, "method": method, "label": key, "digest": digest(arrays)}
    return safetensors.numpy.save(arrays, {NOTE: json.dumps(note)})


def decode(data: bytes) -> Slot:
    """Return a snapshot's slots as tensors; raise ProtocolError for other bytes than `encode` made."""
    slots: Slot = {}
    for key, array in unpack(data).items():
        name, _, entry = key.partition(".")  # a term's name has no dot
        slots.setdefault(name, {})[entry] = torch.from_numpy(array)
    return slots


def to_numpy(value: Any) -> np.ndarray:
    """Return a tensor as an array; bfloat16 and float8, which numpy lacks, become float32 without loss."""
    if isinstance(value, np.ndarray):
        return value
    tensor = (value if isinstance(value, torch.Tensor) else torch.as_tensor(value)).detach().cpu()
    lacks = tensor.is_floating_point() and (tensor.itemsize < 2 or tensor.dtype == torch.bfloat16)
    return (tensor.float() if lacks else tensor).numpy()


class Folder:
    """A client's memory of one training on its own disk, so that it outlives the node and the run.

    ``<root>/partition-<id>/<start id>/<label>.safetensors`` is a snapshot. Each file is written beside its
    place, synced and then moved there, before those go that are needed no more: a crash leaves what was.
    Files of earlier trainings stay. ``personal.safetensors`` holds the client's own model where its method
    makes one (Ditto), or an evaluation does (calibration): whole, for its user. No round reads it.

    Parameters
    ----------
    root : str or path
        The same for all clients of a machine.
    config : mapping
        The message's config: the partition id and the start id name the files. Raises ProtocolError for ids
        that cannot.
    """

    def __init__(self, root: str | os.PathLike[str], config: Config) -> None:
        pid, start = config.get(keys.CLIENT_KEY), config.get(keys.START_KEY)
        if not isinstance(pid, int) or isinstance(pid, bool) or pid < 0 or not keys.is_start(start):
            raise ProtocolError(
                f"save_private needs a partition id and a start id, not {pid!r:.80} and {start!r:.80}"
            )
        self._root, self._method = Path(root), str(config.get(keys.METHOD_KEY))
        self._folder = self._root / f"partition-{pid}" / str(start)

    def completed(self, memory: Memory, config: Config) -> Memory:
        """Return the node's memory, with the snapshots that a round needs and only the disk has."""
        number, used, came = _course(config)
        wanted = [label(used), label(came), label(number, True)]
        return {**self._read(key for key in wanted if key not in memory), **memory}

    def write(self, memory: Memory, config: Config) -> bool:
        """Write what the node remembers after a round; return whether the disk took it.

        Files of this round and of later ones go first: the server repeats them. A disk that is full or
        read-only costs a warning.
        """
        new = label(config[keys.ROUND_KEY], bool(config.get(keys.PROBE_KEY)))
        try:
            for left in self._folder.glob(".*.part"):  # of a crash
                left.unlink()
            present = _snapshots(self._folder, ("round-", "probe-"))
            for key, path in present.items():
                if key == new or key[5:] > new[5:]:
                    path.unlink()
            for key, data in written(memory).items():
                if key == new or key not in present:
                    self._write(key, data)
            for key, path in present.items():
                if key not in memory:
                    path.unlink(missing_ok=True)
        except OSError as error:
            LOG.warning(NOT_WRITTEN, "state", self._folder, described(error))
            return False
        return True

    def write_personal(self, arrays: NDArrays) -> bool:
        """Write the client's own model; return whether the disk took it."""
        try:
            self._write(PERSONAL, encode({PERSONAL: arrays}, self._method, PERSONAL))
        except OSError as error:
            LOG.warning(NOT_WRITTEN, "own model", self._folder, described(error))
            return False
        return True

    def _write(self, key: str, data: bytes) -> None:
        for folder in (self._root, self._folder.parent, self._folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self._folder / f"{key}.safetensors", [data])

    def _read(self, labels: Iterable[str]) -> dict[str, bytes]:
        """Return the snapshots that are there and whole."""
        snapshots: dict[str, bytes] = {}
        for key in labels:
            path = self._folder / f"{key}.safetensors"
            try:
                if path.exists():
                    snapshots[key] = _checked(path, self._method)
            except (OSError, ValueError) as error:
                LOG.warning("this client's saved state is lost: %s", error)
        return snapshots


def _checked(path: Path, method: str | None = None) -> bytes:
    """Return a file's bytes; raise OSError, or ValueError if they are damaged or another snapshot's."""
    data = path.read_bytes()
    try:
        size = int.from_bytes(data[:8], "little")
        note = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][NOTE])
        arrays = safetensors.numpy.load(data)
        whose = note["format"], note["label"], note["method"]
        whole = note["digest"] == digest(arrays)
    except Exception as error:  # whatever the bytes make json or safetensors raise
        raise ValueError(f"the file {path} cannot be read: {described(error)}") from error
    if not whole or whose != (FORMAT, path.stem, method or whose[-1]):
        why = "" if whole else ", and is damaged"
        raise ValueError(f"the file {path} is {whose[1]} of {whose[2]} in format {whose[0]}{why}")
    return data


def _snapshots(folder: Path, kinds: tuple[str, ...] = ("round-",)) -> dict[str, Path]:
    """Return a training's snapshots by label, those of rounds by default; raise OSError."""
    files = folder.iterdir() if folder.is_dir() else ()
    return {p.stem: p for p in files if p.suffix == ".safetensors" and p.stem.startswith(kinds)}


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
    chosen = training or max(paths, key=lambda name: max(p.stat().st_mtime for p in paths[name]))
    for path in paths[chosen]:
        snapshot = decode(_checked(path))
        for part in (PERSONAL, PRIVATE):
            if part in snapshot:
                return dict(snapshot[part])
    raise ValueError(f"{paths[chosen][0]}: clients of this method keep no entries of the model")


def _newest(folder: Path) -> list[Path]:
    """Return a training's last round, and the client's own model; what was written last comes first."""
    rounds, personal = _snapshots(folder), folder / f"{PERSONAL}.safetensors"
    paths = [personal] if personal.is_file() else []
    paths += [rounds[max(rounds)]] if rounds else []
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)
