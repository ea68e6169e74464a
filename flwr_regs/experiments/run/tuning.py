"""What tuning chooses: for each method the best of its points on held-out data, by successive halving.

And what it said, tried and cost, for a reader of the results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.experiment import Experiment, Panel, Run
from flwr_regs.experiments.report.metrics import last
from flwr_regs.experiments.report.run_records import RunRecord, read, record_path
from flwr_regs.experiments.space import Point, Space, edges, grid_size, points, shown

Train = Callable[[Sequence[Run]], Mapping[tuple[str, int], RunRecord]]
"""Trains what is missing of some trials, and returns the records of all, by label and seed."""
MORE = 3
"""Beyond an edge, one point is tried for so many before."""


def tuned(
    experiment: Experiment, panel: Panel, labels: Iterable[str], train: Train
) -> dict[str, dict[str, Any]]:
    """Return label -> what tuning chose (``point``), and among what, for some labels of a panel.

    ``trials`` is how many points were tried, ``lost`` at how many of them a trial diverged or failed,
    ``budget`` how many there were before a range was widened, ``widened`` the keys of such ranges, and
    ``edge`` those at the edge of what was tried. ``grid`` is the size of a grid that has more points than
    may be tried; else 0. ``spaces`` are the spaces' texts.

    All methods have equal budgets. Where the best point of the first rung has the lowest or the highest
    value of a range, a third as many points are tried beyond it, once. The best point has the highest mean
    of the last five rounds; a diverged one is worse than all others. RuntimeError if all trials of a method
    failed otherwise.
    """
    methods = [_Method(experiment, panel, label) for label in labels]

    def climb(rung: int) -> None:
        on_it = [m for m in methods if len(m.tried) > 1 and rung < len(m.rungs)]  # else no choice
        records = train([run for method in on_it for run in method.runs(rung)])
        for method in on_it:
            method.rank(rung, records)

    climb(0)
    for method in methods:
        method.widen()
    if any(method.widened for method in methods):
        climb(0)
    for rung in range(1, max(len(method.rungs) for method in methods)):
        climb(rung)
    return {method.label: method.outcome() for method in methods}


class _Method:
    """The points of one method: `tried` are all, `left` those on the present rung, the best one first."""

    def __init__(self, experiment: Experiment, panel: Panel, label: str) -> None:
        self.experiment, self.panel, self.label = experiment, panel, label
        self.row = experiment.rows_of(panel)[label]
        self.rungs = experiment.rungs_of(panel, label)
        self.tried = experiment.points_of(self.row)
        self.left = [*self.tried]
        combinations = grid_size(experiment.spaces_of(self.row))
        self.grid = combinations if combinations > len(self.tried) else 0
        self.widened: list[str] = []
        self.scores: dict[str, tuple[float, ...]] = {}  # point -> whole, last rung, mean

    def _of(self, point: Point, rung: int) -> list[Run]:
        of, rounds = self.experiment, self.rungs[rung][0]
        return [of.run_of(self.panel, self.label, point, s, rounds) for s in of.tuning_seeds]

    def runs(self, rung: int) -> list[Run]:
        """Return the trials of a rung, for which the best points of the one before are left."""
        if rung:
            self.left = self.left[: self.rungs[rung][1]]
        return [run for point in self.left for run in self._of(point, rung)]

    def rank(self, rung: int, records: Mapping[tuple[str, int], RunRecord]) -> None:
        """Put the best point of a rung first."""
        trained = [records[run.key] for run in self.runs(rung)]
        for point in self.left:
            trials = [records[run.key] for run in self._of(point, rung)]
            whole = all(trial.whole for trial in trials)
            mean = float(np.mean([last(t) if whole else len(t.trained) for t in trials]))
            self.scores[shown(point)] = whole, rung, round(mean, 9)
        self.left.sort(key=lambda point: self.scores[shown(point)], reverse=True)
        if all(trial.status == "failed" for trial in trained):
            first = records[self._of(self.left[0], rung)[0].key]
            many = f"all of its {len(trained)} trials of {self.rungs[rung][0]} rounds failed"
            raise RuntimeError(f"{self.label}: {many}: {first.error}")

    def widen(self) -> None:
        """Try points beyond the edges of ranges at which the best point lies; none that is not legal."""
        if len(self.rungs) == 1:
            return
        at = edges(self.left[0], self.tried)
        spaces = self.experiment.spaces_of(self.row)
        further = {}
        for space in (s.beyond(at[s.key]) for s in spaces if s.key in at and not s.choices):
            ends = [space.at(share) for share in (0.0, 0.5, 1 - 1e-9)]
            with suppress(ValueError):
                for end in ends:
                    self._of({**self.left[0], space.key: end}, 0)[0].strategy()
                if min(ends) > 0:  # what is rounded to 0 means another thing
                    further[space.key] = space
        whole = [further.get(space.key, space) for space in spaces]
        further_points = points(whole, ceil(len(self.tried) / MORE)) if further else []
        if more := [point for point in further_points if point not in self.tried]:
            self.widened = [*further]
            self.tried += more
            self.left += more

    def outcome(self) -> dict[str, Any]:
        """Return what :func:`tuned` says of a method."""
        # where all on the last rung diverged, a point of an earlier one is the best
        best = max([*self.left, *self.tried], key=lambda point: self.scores.get(shown(point), ()))
        return {
            "point": best,
            "trials": len(self.tried),
            "lost": sum(not whole for whole, *_ in self.scores.values()),
            "budget": len(self.experiment.points_of(self.row)),
            "grid": self.grid,
            "spaces": [space.text for space in self.experiment.spaces_of(self.row)],
            "widened": self.widened,
            "edge": [*edges(best, self.tried)],
        }


def notes(chosen: Mapping[str, Point], outcomes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say what tuning chose, where that is at the edge of what was tried, and if budgets were unequal."""
    said, tried, spaces = [], set[Any](), defaultdict[str, set[Space]](set)
    for label, point in chosen.items():
        outcome = outcomes.get(label, {"trials": "some"})
        grid = f" of {size} points of a grid" if (size := outcome.get("grid")) else ""
        best = f"{shown(point, ' = ')}; the best of {outcome['trials']}{grid} on held-out data"
        said.append(f"{label}: {best if point else 'nothing to tune'}")
        lost = outcome.get("lost")
        if lost == outcome["trials"]:
            said[-1] += " (all of them diverged or failed: tune over other values)"
        elif lost:
            said[-1] += f" ({lost} of them diverged or failed)"
        for space in map(Space.read, outcome.get("spaces", ())):
            spaces[space.key].add(space)
        for key in outcome.get("edge", ()):
            again = ", which was widened" * (key in outcome.get("widened", ()))
            said[-1] += f" ({key} is at the edge of what was tried{again})"
        if point:  # a range that is widened adds to the budget, as for every method
            tried.add(outcome.get("budget", outcome["trials"]))
    unlike = [sorted(s.text for s in of) for of in spaces.values() if len(of) > 1]
    said += [f"not tuned alike: {' and '.join(texts)}" for texts in unlike]
    if len(tried) > 1:
        said.append("the budgets are not equal: a grid has as many points as its values make")
    return said


def trials(folder: Path, rows: Collection[str]) -> tuple[list[RunRecord], list[Path]]:
    """Return the trials of these rows in a panel's folder, in order of their files; and all other files."""
    tuning, ours, others = folder / "tuning", [], []
    for path in sorted((tuning / "runs").glob("*.jsonl")):
        run = read(path)
        if run.row in rows and path == record_path(tuning, run.label, run.seed):
            ours.append(run)
        else:
            others.append(path)
    return ours, others


def cost(tried: Sequence[RunRecord]) -> str:
    """Say what tuning cost, and what the results take from it."""
    steps = sum(sum(entry.get("steps", {}).values()) for run in tried for entry in run.rounds)
    seconds = sum(run.processor_seconds or run.seconds for run in tried)
    rounds, seeds = max(run.job["rounds"] for run in tried), sorted({run.seed for run in tried})
    with_seeds = f"with seed {', '.join(map(str, seeds))}"
    took = f"{len(tried)} trainings of at most {rounds} rounds, {seconds:,.0f} s of processor time"
    beside = "Intervals and p-values leave out that other seeds might have tuned otherwise."
    return f"Tuning took {took} and {steps:,} local steps, {with_seeds}. {beside}"
