"""Progress of runs on the screen: a bar for each row on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from flwr_regs.experiments.experiment import Run

LINES = 10
"""Plain lines for each run, at most about."""
BREATH = 1.0
"""Seconds between two of them, at least; a run's last round is always told."""
SILENCE = 2.0
"""Seconds after which a terminal is told of what takes long; then after twice as long each time."""
MOST = 5
"""A later pause is at most so many times the first one."""
PIPED = 30.0
"""The same, and the least seconds between two such lines, for a file or a pipe."""


class Progress:
    """What is told of runs while they train; this one says nothing.

    Parameters
    ----------
    runs : sequence of Run
    """

    quiet = True
    screen: AbstractContextManager[Any] = nullcontext()
    """What leaves the screen in order."""

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        self.rounds: dict[tuple[str, int], int] = {run.key: run.settings.rounds for run in runs}
        self.seen = dict.fromkeys(self.rounds, 0)
        self.first: tuple[float, int] | None = None  # the first news: its time, the rounds done

    def round(self, label: str, seed: int, server_round: int, accuracy: float) -> None:
        """Note that a run has trained a round (0: tested the initial model) and show it."""
        last = self.rounds.get((label, seed), 0)
        if not self.seen.get((label, seed)) and 1 < server_round < last:
            self.say(f"{label}, seed {seed}: goes on after round {server_round - 1}")
        self.seen[label, seed] = server_round
        self.first = self.first or (time.monotonic(), sum(self.seen.values()))
        self.show(label, seed, accuracy)

    def ended(self, label: str, seed: int, note: str) -> None:
        """Note that a run has ended; `note` says why if it was early."""
        self.seen[label, seed] = self.rounds.get((label, seed), 0)
        self.show(label, seed)
        if note:
            self.say(f"{label}, seed {seed}: {note}")

    def show(self, label: str, seed: int, accuracy: float | None = None) -> None:
        """Show a round; without an accuracy, the end of a run."""

    def within(self, label: str, seed: int, text: str) -> None:
        """Show what a run is at, within a round that takes long."""

    def say(self, text: str) -> None:
        """Print a line."""

    def left(self) -> str:
        """Say how long the rest takes, if it goes on as it did."""
        done, total = sum(self.seen.values()), sum(self.rounds.values())
        began, before = self.first or (0.0, done)
        spent = time.monotonic() - began
        if done in (before, total) or spent < BREATH:  # news of several rounds may come at once
            return ""
        return f"{duration(spent / (done - before) * (total - done))} left"


class Lines(Progress):
    """Plain lines, for a file or a pipe: a run's last round, and up to ten before it.

    Those are the first round and every tenth of them, not less than `BREATH` apart; of more than `LINES`
    runs, not less than `PIPED` apart. What a run is at within a round is told where nothing else has been
    for `PIPED` seconds.
    """

    quiet = False

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__(runs)
        self._spoke = 0.0  # when the last line was printed
        self._apart = BREATH if len(runs) <= LINES else PIPED

    def _name(self, label: str, seed: int) -> str:
        width = min(max(len(label) for label, _ in self.rounds), 32)
        return f"{label:<{width}}" + f" seed {seed}" * (len({s for _, s in self.rounds}) > 1)

    def show(self, label: str, seed: int, accuracy: float | None = None) -> None:
        """Print some of the rounds."""
        server_round, rounds = self.seen[label, seed], self.rounds[label, seed]
        every = max(rounds // LINES, 1)
        told = server_round == 1 or server_round in range(every, rounds, every)
        told &= time.monotonic() - self._spoke > self._apart
        if accuracy is not None and (told or server_round == rounds):
            at = f"round {server_round:>4}/{rounds}"
            self.say(f"{self._name(label, seed)} {at}   accuracy {accuracy:7.2%}   {self.left()}")

    def within(self, label: str, seed: int, text: str) -> None:
        """Print what a run is at, unless another line is recent."""
        if time.monotonic() - self._spoke > PIPED:
            self.say(f"{self._name(label, seed)} {text}")

    def say(self, text: str) -> None:
        """Print a line without delay."""
        self._spoke = time.monotonic()
        print(text.rstrip(), flush=True)


class Bars(Progress):
    """A bar for each label: rounds done over all its seeds, the last accuracy, the time left."""

    quiet = False

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__(runs)
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        fields = (TextColumn(f"{{task.fields[{name}]}}") for name in ("accuracy", "left"))
        short = TextColumn("{task.description}", markup=False)
        columns = (short, BarColumn(None), MofNCompleteColumn(), *fields)
        self.bars = self.screen = RichProgress(*columns, expand=True)
        self.tasks = {}
        for label in dict.fromkeys(label for label, _ in self.rounds):
            name = label if len(label) <= 30 else label[:29] + "…"
            total = sum(rounds for (of, _), rounds in self.rounds.items() if of == label)
            self.tasks[label] = self.bars.add_task(name, total=total, accuracy="", left="")

    def show(self, label: str, seed: int, accuracy: float | None = None) -> None:
        """Move a label's bar."""
        done = sum(rounds for (of, _), rounds in self.seen.items() if of == label)
        shown: dict[str, Any] = {} if accuracy is None else {"accuracy": f"{accuracy:7.2%}"}
        left = self.left() if done < (self.bars.tasks[self.tasks[label]].total or 0) else ""
        self.bars.update(self.tasks[label], completed=done, left=left, **shown)

    def within(self, label: str, seed: int, text: str) -> None:
        """Show at a label's bar what a run is at."""
        self.bars.update(self.tasks[label], left=text)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.bars.console.print(text, markup=False, highlight=False)


class Heartbeat:
    """Tells what a run is at, from a thread of its own, where that takes long: see `SILENCE` and `PIPED`.

    On a terminal, only what takes long by itself is told of; for a file or a pipe, short stages add up.

    Parameters
    ----------
    tell : callable
        Called with the text.
    what : str
        What the run is at; empty: nothing that is told.
    """

    def __init__(self, tell: Callable[[str], None], what: str = "") -> None:
        self._tell, self._stop = tell, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._silence, self._adds_up = (SILENCE, False) if on_terminal() else (PIPED, True)
        self.what = ""
        self._wait(self._silence)
        self.at(what)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def at(self, what: str, done: int = 0, total: int = 0) -> None:
        """Note what the run is at now, and how much of it is done; empty: nothing that is told."""
        if what != self.what or not done:
            self.what, self.began = what, time.monotonic()
            if not self._adds_up:
                self._wait(self._silence)
        self.done, self.total = done, total

    def one_more(self, what: str, total: int) -> None:
        """Note that one more of what the run is at has begun."""
        self.at(what, self.done + 1 if what == self.what and self.total else 0, total)

    def _wait(self, seconds: float) -> None:
        """Tell nothing for some time."""
        self._next, self._pause = time.monotonic() + seconds, seconds

    def _beat(self) -> None:
        while not self._stop.wait(0.2):
            if not self.what or time.monotonic() < self._next:
                continue
            self._wait(min(2 * self._pause, MOST * self._silence))
            spent = time.monotonic() - self.began
            so_far = f", {duration(spent)} so far" * (spent > min(BREATH, self._silence))
            if self.total:
                so_far = f", {min(self.done, self.total):,} of {self.total:,}"
            if 0 < self.done < self.total:
                so_far += f", {duration(spent / self.done * (self.total - self.done))} left"
            self._tell(self.what + so_far)


def progress(runs: Sequence[Run]) -> Progress:
    """Return bars if standard output is a terminal, else lines."""
    return Bars(runs) if on_terminal() else Lines(runs)


def on_terminal() -> bool:
    """Return whether standard output is a terminal; it may be closed."""
    stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # the bars stand before it
    return stdout is not None and bool(stdout.isatty())


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 round, 20 rounds."""
    return f"{number} {noun}{'s' * (number != 1)}"


def rounds_of(runs: Sequence[Run]) -> str:
    """Say how many rounds some runs have at most."""
    every: list[int] = [run.settings.rounds for run in runs]
    return "up to " * (min(every) < max(every)) + counted(max(every), "round")


def duration(seconds: float) -> str:
    """Return a time as people say it: 250 µs, 3.5 ms, 40 s, 12 min, 3 h 20 min."""
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{max(seconds / size, 0.01):.3g} {unit}"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
