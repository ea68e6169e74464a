"""Callbacks for `on_round` that write each round as it ends: JSON lines, and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from flwr_regs.wire.files import write_atomically


class JsonLines:
    """Write each finished round's entry of the history as a line of JSON.

    After a resume, the lines of rounds that run again are replaced. A training that begins at round 1 keeps
    an earlier file beside it, as ``<name>.1`` and so on.

    Parameters
    ----------
    path : str or Path
        The file; its folder is made. Whole lines are written and flushed, so that others may read along.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._last = math.inf

    def __call__(self, entry: Mapping[str, Any]) -> None:
        """Append one entry. Numbers that JSON lacks (NaN, infinity) are written as Python does."""
        if entry["round"] <= self._last:  # another training, or one that is resumed
            self._begin(entry["round"])
        self._last = entry["round"]
        with self.path.open("ab") as file:
            end = file.tell()
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(entry, default=str) + "\n")
        except OSError:  # a full disk may have taken half of the line
            os.truncate(self.path, end)
            raise

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"

    def _begin(self, first: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            lines = self.path.read_text().splitlines()
            if kept := [f"{line}\n".encode() for line in lines if _round_of(line) < first]:
                write_atomically(self.path, kept, 0o666)
            else:
                names = (self.path.with_name(f"{self.path.name}.{i}") for i in count(1))
                self.path.rename(next(name for name in names if not name.exists()))


def _round_of(line: str) -> float:
    """Return the round of a line; infinity for a line that a crash cut."""
    try:
        return float(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class TensorBoard:
    """Write each finished round's numbers for TensorBoard, which needs the extra ``tensorboard``.

    Tags are paths in the history: ``server_metrics/accuracy``, ``train_metrics/train-loss``,
    ``seconds/clients``, and totals such as ``bytes_up``. After a resume, points of rounds
    that run again are hidden.

    Parameters
    ----------
    folder : str or Path

    Raises
    ------
    ImportError
        TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        if find_spec("tensorboard") is None:
            raise ImportError("flwr_regs.TensorBoard needs `pip install tensorboard`")
        self.folder = Path(folder)
        self._last = math.inf

    def __call__(self, entry: Mapping[str, Any]) -> None:
        """Write one entry, and flush."""
        if entry["round"] <= self._last:  # another training, or one that is resumed
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=entry["round"])
        self._last = entry["round"]
        for tag, value in numbers(entry).items():
            self._writer.add_scalar(tag, value, entry["round"])
        self._writer.flush()

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})"


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round's entry that are worth a curve, by path: metrics, seconds, totals."""
    curves: dict[str, float] = {}
    for key, value in entry.items():
        if key.endswith("_metrics") or key == "seconds":
            curves |= {f"{key}/{k}": v for k, v in value.items() if isinstance(v, int | float)}
        elif key.startswith("bytes_"):
            curves[key] = sum(value.values())
        elif key in ("replies", "failures", "late"):
            curves[key] = len(value)
        elif isinstance(value, int | float) and key != "round":
            curves[key] = value
    return curves
