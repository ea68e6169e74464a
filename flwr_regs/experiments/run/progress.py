"""Progress of runs on the screen: a bar for each row on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

LINES = 10
"""Plain lines for each run, about."""


class Progress:
    """What is told of runs while they train; this one says nothing.

    Parameters
    ----------
    runs : sequence of (str, int, int)
        Each run's label, seed and rounds.
    """

    def __init__(self, runs: Sequence[tuple[str, int, int]]) -> None:
        self.runs = runs
        self.total = sum(rounds for _, _, rounds in runs)
        self.done, self.seen = 0, dict[tuple[str, int], int]()
        self.first: tuple[float, int] | None = (
            None  # the time of the first news, and the rounds done then
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the screen in order."""

    def round(self, label: str, seed: int, server_round: int, accuracy: float) -> None:
        """Note that a run has trained a round (0: tested the initial model) and show it."""
        self.done += server_round - self.seen.get((label, seed), 0)
        self.seen[label, seed] = server_round
        self.first = self.first or (time.monotonic(), self.done)
        self.show(label, seed, server_round, accuracy)

    def show(self, label: str, seed: int, server_round: int, accuracy: float) -> None:
        """Show a round."""

    def ended(self, label: str, seed: int, note: str) -> None:
        """Note that a run has ended; `note` says why if it was early."""
        rounds = next(r for n, s, r in self.runs if (n, s) == (label, seed))
        self.done += rounds - self.seen.get((label, seed), 0)
        self.seen[label, seed] = rounds

    def left(self) -> str:
        """Say how long the rest takes, if it goes on as it did."""
        began, before = self.first or (0.0, self.done)
        if self.done == before or self.done == self.total:
            return ""
        seconds = (time.monotonic() - began) / (self.done - before) * (self.total - self.done)
        return f"{duration(seconds)} left"


class Lines(Progress):
    """Plain lines, for a file or a pipe."""

    def __init__(self, runs: Sequence[tuple[str, int, int]], out: TextIO | None = None) -> None:
        super().__init__(runs)
        self.out = out or sys.stdout
        self.width = max((len(label) for label, _, _ in runs), default=0)
        self.several = len({seed for _, seed, _ in runs}) > 1

    def show(self, label: str, seed: int, server_round: int, accuracy: float) -> None:
        """Print about ten lines a run: the first round, and then every tenth of them."""
        rounds = next(r for n, s, r in self.runs if (n, s) == (label, seed))
        every = max(rounds // LINES, 1)
        if server_round in (1, rounds) or (server_round and server_round % every == 0):
            of = f" seed {seed}" if self.several else ""
            self._say(
                f"{label:<{min(self.width, 32)}}{of} round {server_round:>4}/{rounds}   accuracy "
                f"{accuracy:7.2%}   {self.left()}"
            )

    def ended(self, label: str, seed: int, note: str) -> None:
        """Print why a run ended early."""
        super().ended(label, seed, note)
        if note:
            self._say(f"{label}, seed {seed}: {note[:300]}")

    def _say(self, text: str) -> None:
        print(text.rstrip(), file=self.out, flush=True)


class Bars(Progress):
    """A bar for each label: rounds done over all its seeds, the last accuracy, the time left."""

    def __init__(self, runs: Sequence[tuple[str, int, int]]) -> None:
        super().__init__(runs)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        short = TextColumn("{task.description}", markup=False)
        columns: list[Any] = [short, BarColumn(None), MofNCompleteColumn()]
        columns += [TextColumn("{task.fields[accuracy]}"), TextColumn("{task.fields[left]}")]
        self.console = Console()
        self.bars = RichProgress(*columns, console=self.console, expand=True)
        rounds: dict[str, int] = {}
        for label, _, count in runs:
            rounds[label] = rounds.get(label, 0) + count
        self.rounds = rounds
        self.tasks = {
            label: self.bars.add_task(
                label if len(label) <= 30 else label[:29] + "…", total=n, accuracy="", left=""
            )
            for label, n in rounds.items()
        }

    def __enter__(self) -> Bars:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def show(self, label: str, seed: int, server_round: int, accuracy: float) -> None:
        """Move a label's bar."""
        done = sum(t for (name, _), t in self.seen.items() if name == label)
        text = f"{accuracy:7.2%}"
        self.bars.update(self.tasks[label], completed=done, accuracy=text, left=self.left())

    def ended(self, label: str, seed: int, note: str) -> None:
        """Fill a run's share of its bar; print why it ended early."""
        super().ended(label, seed, note)
        done = sum(t for (name, _), t in self.seen.items() if name == label)
        left = self.left() if done < self.rounds[label] else ""
        self.bars.update(self.tasks[label], completed=done, left=left)
        if note:
            self.console.print(f"{label}, seed {seed}: {note[:300]}", markup=False, highlight=False)


def progress(runs: Sequence[tuple[str, int, int]]) -> Progress:
    """Return bars if standard output is a terminal, else lines."""
    return Bars(runs) if sys.stdout.isatty() else Lines(runs)


def duration(seconds: float) -> str:
    """Return a time as people say it: 40 s, 12 min, 3 h 20 min."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
