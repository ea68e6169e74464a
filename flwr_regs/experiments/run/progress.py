"""Progress of runs on the screen: a bar for each row on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

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
        self.rounds = {(label, seed): rounds for label, seed, rounds in runs}
        self.seen = dict.fromkeys(self.rounds, 0)
        self.first: tuple[float, int] | None = (
            None  # the first news: its time, the rounds done then
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the screen in order."""

    def round(self, label: str, seed: int, server_round: int, accuracy: float) -> None:
        """Note that a run has trained a round (0: tested the initial model) and show it."""
        self.seen[label, seed] = server_round
        self.first = self.first or (time.monotonic(), sum(self.seen.values()))
        self.show(label, seed, accuracy)

    def ended(self, label: str, seed: int, note: str) -> None:
        """Note that a run has ended; `note` says why if it was early."""
        self.seen[label, seed] = self.rounds[label, seed]
        self.show(label, seed)
        if note:
            self.say(f"{label}, seed {seed}: {note[:300]}")

    def show(self, label: str, seed: int, accuracy: float | None = None) -> None:
        """Show a round; without an accuracy, the end of a run."""

    def say(self, text: str) -> None:
        """Print a line."""

    def left(self) -> str:
        """Say how long the rest takes, if it goes on as it did."""
        done, total = sum(self.seen.values()), sum(self.rounds.values())
        began, before = self.first or (0.0, done)
        if done in (before, total):
            return ""
        seconds = (time.monotonic() - began) / (done - before) * (total - done)
        return f"{duration(seconds)} left"


class Lines(Progress):
    """Plain lines, for a file or a pipe: about ten a run, the first round, and then every tenth of them."""

    def show(self, label: str, seed: int, accuracy: float | None = None) -> None:
        """Print some of the rounds."""
        server_round, rounds = self.seen[label, seed], self.rounds[label, seed]
        last = server_round in (1, rounds)
        if accuracy is None or not (
            last or (server_round and not server_round % max(rounds // LINES, 1))
        ):
            return
        width = min(max(len(label) for label, _ in self.rounds), 32)
        of = f" seed {seed}" if len({seed for _, seed in self.rounds}) > 1 else ""
        self.say(
            f"{label:<{width}}{of} round {server_round:>4}/{rounds}   accuracy {accuracy:7.2%}   "
            f"{self.left()}"
        )

    def say(self, text: str) -> None:
        """Print a line without delay."""
        print(text.rstrip(), flush=True)


class Bars(Progress):
    """A bar for each label: rounds done over all its seeds, the last accuracy, the time left."""

    def __init__(self, runs: Sequence[tuple[str, int, int]]) -> None:
        super().__init__(runs)
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        short = TextColumn("{task.description}", markup=False)
        columns: list[Any] = [short, BarColumn(None), MofNCompleteColumn()]
        columns += [TextColumn("{task.fields[accuracy]}"), TextColumn("{task.fields[left]}")]
        self.bars = RichProgress(*columns, expand=True)
        self.tasks = {}
        for label in dict.fromkeys(label for label, _ in self.rounds):
            name = label if len(label) <= 30 else label[:29] + "…"
            total = sum(rounds for (of, _), rounds in self.rounds.items() if of == label)
            self.tasks[label] = self.bars.add_task(name, total=total, accuracy="", left="")

    def __enter__(self) -> Bars:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def show(self, label: str, seed: int, accuracy: float | None = None) -> None:
        """Move a label's bar."""
        done = sum(rounds for (of, _), rounds in self.seen.items() if of == label)
        shown: dict[str, Any] = {} if accuracy is None else {"accuracy": f"{accuracy:7.2%}"}
        task = self.tasks[label]
        self.bars.update(task, completed=done, **shown)
        finished = self.bars.tasks[task].finished
        self.bars.update(task, left="" if finished else self.left())

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.bars.console.print(text, markup=False, highlight=False)


def progress(runs: Sequence[tuple[str, int, int]]) -> Progress:
    """Return bars if standard output is a terminal, else lines."""
    return Bars(runs) if sys.stdout.isatty() else Lines(runs)


def duration(seconds: float) -> str:
    """Return a time as people say it: 40 s, 12 min, 3 h 20 min."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
