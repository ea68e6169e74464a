"""The record of one run, which is one method with one seed: a file of JSON lines, written as it trains.

The first line says what runs, each further one is a round, and the last one is the end. So whatever stops
a run, its rounds are there.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.report.folders import write, writing

NOT_FINITE = re.compile(r"NaN|\bnan\b|infinity|\binf\b|beyond|diverge|over \S+ times (the|its) ")
"""What the server says of a reply, a step or a round that has left the numbers."""


@dataclass
class RunRecord:
    """One run, as far as it got.

    Attributes
    ----------
    label, method, seed : str, str, int
        What names it beside its seed, its method, and its seed.
    job : dict
        Every setting, by name.
    clients : int
        The clients that the data was split over.
    settings : dict
        The terms' hyper-parameters.
    left : str
        What was left of the data set; empty: all.
    row, point : str, dict
        Its row in the tables, and what tuning tried in it, or had chosen for it.
    weighting : str
        How the server weighs clients; empty if it does not.
    runner : str
        ``process``, ``stacked`` or ``ray``; several, where it was resumed in another; empty if not known.
    test : list of dict
        ``round``, ``loss`` and ``accuracy`` of the global model; round 0 is the initial one.
    rounds : list of dict
        The strategy's history: an entry a round.
    per_client : dict
        ``clients`` (each client's accuracy with the final model; None: it has none), ``mean``, ``std``,
        ``worst``.
    seconds, processor_seconds : float, float or None
        Of the training; the processor's where all of it ran in one process.
    spent : list of float
        The processor's seconds until each test; empty where they are not known.
    error : str
        Why it ended early; empty if it did not.
    averaged : float or None
        The accuracy of the method's averaged model at the end, where it has one: FedExP, FedACG.
    warnings : list of str
        What the log warned of.
    diverged : bool
        Whether that was because its numbers left the finite ones.
    ended : bool
        Whether it ran to its end, or diverged: nothing is left to do.
    torn : bool
        Whether its record, as it was read, ends within a line: it was cut, or the process was killed.
    """

    label: str
    method: str
    seed: int
    job: dict[str, Any]
    clients: int
    settings: dict[str, Any]
    left: str = ""
    row: str = ""
    point: dict[str, Any] = field(default_factory=dict)
    weighting: str = ""
    runner: str = ""
    test: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    per_client: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    processor_seconds: float | None = None
    spent: list[float] = field(default_factory=list)
    averaged: float | None = None
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    diverged: bool = False
    ended: bool = False
    torn: bool = False

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The tests after round 1 and later."""
        return [point for point in self.test if point["round"] > 0]

    @property
    def accuracy(self) -> list[float]:
        """The accuracy after each round from the first."""
        return [point["accuracy"] for point in self.trained]

    @property
    def untrained(self) -> float:
        """The initial model's accuracy, which a run that diverged counts with; 0 where nobody tested it."""
        return float(self.test[0]["accuracy"]) if self.test and not self.test[0]["round"] else 0.0

    @property
    def whole(self) -> bool:
        """Whether it ran to its end, and was tested: it counts in all means."""
        return self.status == "ended" and bool(self.trained)

    @property
    def megabytes(self) -> list[float]:
        """10^6 bytes after each round, down and up together, per client of the population."""
        ways = ("bytes_down", "bytes_up", "bytes_ahead")
        each = [[a.get(way, {}) for a in attempts(r) for way in ways] for r in self.rounds]
        spent = [sum(sum(sent.values()) for sent in of_round) for of_round in each]
        return [float(s) / self.clients / 1e6 for s in np.cumsum(spent)]

    @property
    def clock(self) -> list[float]:
        """Seconds after each round."""
        spent = [sum(sum(a.get("seconds", {}).values()) for a in attempts(r)) for r in self.rounds]
        return [float(s) for s in np.cumsum(spent)]

    @property
    def status(self) -> str:
        """``diverged``, ``failed``, ``unfinished`` or ``ended``."""
        if self.error:
            return "diverged" if self.diverged else "failed"
        return "ended" if self.ended else "unfinished"

    @property
    def stopped(self) -> str:
        """Why it ended early, in a line; empty if it did not."""
        if self.status == "diverged":
            return f"diverged in round {len(self.trained) + 1}"
        if self.status == "unfinished":
            cut = ", and its record ends within a line" if self.torn else ""
            return f"it has {len(self.rounds)} of {self.job['rounds']} rounds{cut}"
        return " ".join(self.error.split())

    def keep_clients(self, accuracies: np.ndarray[Any, Any]) -> None:
        """Keep each client's accuracy with the final model; NaN: it has none."""
        known = accuracies[~np.isnan(accuracies)]
        self.per_client = {"clients": strict(accuracies.tolist())}
        if known.size:
            spread = {"mean": known.mean(), "std": known.std(), "worst": known.min()}
            self.per_client |= {name: float(value) for name, value in spread.items()}

    @property
    def rejected(self) -> int:
        """Replies that were not used because something was wrong with them."""
        return sum(len(r.get("failures", {})) for r in self.rounds)


UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IsADirectoryError, RecursionError)
"""What reading raises for a damaged record, for a folder in its place, or for values nested without end."""
_FIELDS = [of.name for of in fields(RunRecord)]
HEAD = _FIELDS[: _FIELDS.index("test")]
"""What a record's first line holds: all that is known before the first round."""
END = _FIELDS[_FIELDS.index("per_client") : _FIELDS.index("torn")]
"""What a record's last line holds."""


def attempts(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a round's earlier attempts, which failed and cost the same, and the round itself."""
    return [*entry.get("attempts", ()), entry]


def file_name(label: str) -> str:
    """Return a label as the name of a file; a long or changed one ends in a number."""
    plain = re.sub(r"[^\w.+=,()-]+|^\.+$", "_", label)
    plain = plain.encode()[:100].decode(errors="ignore")  # file systems count bytes
    return plain if plain == label else f"{plain}-{zlib.crc32(label.encode()):08x}"


class Recorder:
    """Writes one run's record into ``folder/runs``, as it trains; with no folder, nowhere.

    A run that goes on has rounds already: they replace what is there in one step.
    """

    def __init__(self, folder: Path | None, run: RunRecord) -> None:
        self._path = None if folder is None else record_path(folder, run.label, run.seed)
        self._run, self._rounds = run, len(run.rounds)
        lines: list[dict[str, Any]] = [{"run": {name: getattr(run, name) for name in HEAD}}]
        lines += [{"round": entry} for entry in run.rounds]
        lines += [{"test": point} for point in run.test]
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text, self._check = _checked(lines)
            write(self._path, text)
            self._size = len(text)

    def round(self) -> None:
        """Write what is new since the last call: rounds, and the last test."""
        self._append({"test": self._run.test[-1]})

    def end(self) -> None:
        """Write what is left, and the end."""
        self._append({"end": {name: getattr(self._run, name) for name in END}})

    def _append(self, last: dict[str, Any]) -> None:
        if self._path is None:
            return
        lines = [*({"round": entry} for entry in self._run.rounds[self._rounds :]), last]
        text, check = _checked(lines, self._check)
        with writing(self._path), self._path.open("r+b") as file:
            file.truncate(self._size)  # without what a full disk has torn
            file.seek(self._size)
            file.write(text)
        self._rounds, self._check = len(self._run.rounds), check
        self._size += len(text)


def _checked(lines: Iterable[dict[str, Any]], check: int = 0) -> tuple[bytes, int]:
    """Return lines as bytes, each with a check of itself and of all before it, and the last check."""
    whole = b""
    for line in lines:
        text = json.dumps(strict(line)).encode()
        check = zlib.crc32(text, check)
        whole += text[:-1] + f', "check": "{check:08x}"}}\n'.encode()
    return whole, check


def record_path(folder: Path, label: str, seed: int) -> Path:
    """Return where a run's record is."""
    return folder / "runs" / f"{file_name(label)}-seed{seed}.jsonl"


def recorded(runs: Iterable[Run], folder: Path) -> dict[tuple[str, int], RunRecord]:
    """Return (label, seed) -> record of those runs that have trained at all, as far as they got, in order.

    Raises ValueError for a damaged record, as :func:`read` does.
    """
    paths = {run.key: record_path(folder, *run.key) for run in runs}
    return {key: read(path) for key, path in paths.items() if path.is_file() or path.is_dir()}


def missing(runs: Sequence[Run], folder: Path) -> list[Run]:
    """Return the runs that have not ended."""
    ended = {key for key, record in recorded(runs, folder).items() if record.ended}
    return [run for run in runs if run.key not in ended]


def read(path: Path) -> RunRecord:
    """Return the run of a record, as far as it got.

    The last line may be torn: the process was killed while it wrote it. Raises ValueError for any other
    line that cannot be read; the message names the file.
    """
    run, so_far = None, 0
    try:
        *lines, rest = path.read_bytes().split(b"\n")
        checked = b'"check": ' in b"".join(lines[:1])  # older records have none
        for number, text in enumerate(lines, start=1):
            try:
                content = json.loads(text)
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON") from error
            check = content.pop("check", "")
            so_far = zlib.crc32(json.dumps(content).encode(), so_far)
            if checked and check != f"{so_far:08x}":
                raise ValueError(f"line {number}, or one before it, is not as it was written")
            run = run or RunRecord(**content["run"])
            if "round" in content:
                run.rounds.append(content["round"])
            if "test" in content:
                run.test.append(content["test"])
            vars(run).update(content.get("end", {}))
        if run is None:
            raise ValueError("it has no whole line")
        run.torn = bool(rest)
    except UNREADABLE as error:
        hint = "restore it; or remove it, and --resume trains the run again"
        raise ValueError(f"{path} is damaged ({error}): {hint}") from error
    return run


def diverged(error: str, rounds: Sequence[dict[str, Any]]) -> bool:
    """Return whether a round failed because numbers left the finite ones: half of its failures say so."""
    last = [*rounds[-1].get("failures", {}).values()] if rounds else []
    lost = [text for text in last if NOT_FINITE.search(text)]
    return bool(NOT_FINITE.search(error)) and 2 * len(lost) >= len(last)


def strict(value: Any) -> Any:
    """Return a value as JSON can hold it: no NaN or infinity, keys as text."""
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
