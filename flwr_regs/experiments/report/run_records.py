"""The record of one run, which is one method with one seed: a file of JSON lines, written as it trains.

The first line says what runs, each further one is a round, and the last one is the end. So whatever stops
a run, its rounds are there.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.experiment import Run

END = ("per_client", "seconds", "processor_seconds", "error", "warnings", "diverged", "ended")
"""What a record's last line holds."""
NOT_FINITE = re.compile(r"NaN|nan|infinity|\binf\b|beyond|diverge")
"""What the server says of a reply, a step or a round that has left the numbers."""


@dataclass
class RunRecord:
    """One run, as far as it got.

    Attributes
    ----------
    label, method, seed : str, str, int
        Its row in the tables, its method, and its seed.
    job : dict
        Every setting, by name.
    clients : int
        The clients that the data was split over.
    settings : dict
        The terms' hyper-parameters.
    test : list of dict
        ``round``, ``loss`` and ``accuracy`` of the global model; round 0 is the initial one.
    rounds : list of dict
        The strategy's history: an entry a round.
    per_client : dict
        ``clients`` (each client's accuracy with the final model), ``mean``, ``std``, ``worst``.
    seconds, processor_seconds : float, float or None
        Of the training; the processor's where all of it ran in one process.
    error : str
        Why it ended early; empty if it did not.
    warnings : list of str
        What the log warned of.
    diverged : bool
        Whether that was because its numbers left the finite ones.
    ended : bool
        Whether it ran to its end, or diverged: nothing is left to do.
    """

    label: str
    method: str
    seed: int
    job: dict[str, Any]
    clients: int
    settings: dict[str, Any]
    test: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    per_client: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    processor_seconds: float | None = None
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    diverged: bool = False
    ended: bool = False

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The tests after round 1 and later."""
        return [point for point in self.test if point["round"] > 0]

    @property
    def accuracy(self) -> list[float]:
        """The accuracy after each round from the first."""
        return [point["accuracy"] for point in self.trained]

    @property
    def whole(self) -> bool:
        """Whether it ran to its end, and was tested: it counts in means."""
        return self.ended and not self.error and bool(self.trained)

    @property
    def megabytes(self) -> list[float]:
        """10^6 bytes after each round, down and up together, per client of the population."""
        ways = ("bytes_down", "bytes_up", "bytes_ahead")
        spent = [sum(sum(r.get(way, {}).values()) for way in ways) for r in self.rounds]
        return [float(s) / self.clients / 1e6 for s in np.cumsum(spent)]

    @property
    def clock(self) -> list[float]:
        """Seconds after each round."""
        spent = [sum(r.get("seconds", {}).values()) for r in self.rounds]
        return [float(s) for s in np.cumsum(spent)]

    @property
    def stopped(self) -> str:
        """Why it ended early, in a line; empty if it did not."""
        if self.diverged:
            return f"diverged in round {len(self.trained) + 1}"
        if not self.ended and not self.error:
            return f"it has {len(self.rounds)} of {self.job['rounds']} rounds"
        return " ".join(self.error.split())[:300]

    @property
    def rejected(self) -> int:
        """Replies that were not used because something was wrong with them."""
        return sum(len(r.get("failures", {})) for r in self.rounds)

    def entry(self) -> dict[str, Any]:
        """Return the run as an entry of ``history.json``."""
        fields = {k: v for k, v in vars(self).items() if k not in ("job", "clients", "ended")}
        return {k: v for k, v in fields.items() if v not in ("", None, False, [])}


def file_name(label: str) -> str:
    """Return a label without what file systems refuse; a long or changed one ends in a number."""
    plain = re.sub(r"[^\w.+=,()-]+", "_", label)
    plain = plain.encode()[:100].decode(errors="ignore")  # file systems count bytes
    return plain if plain == label else f"{plain}-{zlib.crc32(label.encode()):08x}"


class Recorder:
    """Writes one run's record into ``folder/runs``; with no folder, nowhere.

    A run that goes on has rounds already: they replace what is there in one step.
    """

    def __init__(self, folder: Path | None, run: RunRecord) -> None:
        self._rounds = 0
        self._file = None
        if folder is not None:
            path = record_path(folder, run.label, run.seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(".part")
            self._file = beside.open("w", encoding="utf-8")
        head = ("label", "method", "seed", "job", "clients", "settings")
        self._write({"run": {name: getattr(run, name) for name in head}})
        for entry in run.rounds:
            self._write({"round": entry})
        for point in run.test:
            self._write({"test": point})
        self._rounds = len(run.rounds)
        if folder is not None:
            os.replace(beside, path)

    def round(self, run: RunRecord) -> None:
        """Write what is new since the last call: rounds, and the last test."""
        new = [{"round": r} for r in run.rounds[self._rounds :]] or [{}]
        self._rounds = len(run.rounds)
        for line in new[:-1]:
            self._write(line)
        self._write({**new[-1], "test": run.test[-1]})

    def end(self, run: RunRecord) -> None:
        """Write what is left, and the end if there is one; close the file."""
        for entry in run.rounds[self._rounds :]:
            self._write({"round": entry})
        self._write({"end": {name: getattr(run, name) for name in END}})
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(strict(line)) + "\n")
            self._file.flush()


def record_path(folder: Path, label: str, seed: int) -> Path:
    """Return where a run's record is."""
    return folder / "runs" / f"{file_name(label)}-seed{seed}.jsonl"


def recorded(runs: Iterable[Run], folder: Path) -> list[RunRecord]:
    """Return those of some runs that have trained at all, as far as they got, in order."""
    paths = [record_path(folder, run.label, run.seed) for run in runs]
    return [record for path in paths if path.is_file() and (record := read(path))]


def missing(runs: Iterable[Run], folder: Path) -> list[Run]:
    """Return the runs that have not ended."""
    runs = [*runs]
    ended = {(record.label, record.seed) for record in recorded(runs, folder) if record.ended}
    return [run for run in runs if (run.label, run.seed) not in ended]


def read(path: Path) -> RunRecord | None:
    """Return the run of a record, as far as it got; None if its first line is not whole."""
    lines: list[dict[str, Any]] = []
    for text in path.read_bytes().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:  # the process ended while it wrote this line
            break
    if not lines or "run" not in lines[0]:
        return None
    try:
        run = RunRecord(**lines[0]["run"])
    except TypeError as error:
        raise ValueError(f"{path} is damaged, or of another version: {error}") from error
    for line in lines[1:]:
        if "round" in line:
            run.rounds.append(line["round"])
        if "test" in line:
            run.test.append(line["test"])
        vars(run).update(line.get("end", {}))
    return run


def diverged(error: str, rounds: Sequence[dict[str, Any]]) -> bool:
    """Return whether a round failed because numbers left the finite ones."""
    last: Iterable[str] = rounds[-1].get("failures", {}).values() if rounds else ()
    return all(map(NOT_FINITE.search, (error, *last)))


def strict(value: Any) -> Any:
    """Return a value as JSON can hold it: no NaN or infinity, keys as text."""
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
