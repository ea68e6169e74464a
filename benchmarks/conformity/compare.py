"""Where an implementation's run leaves the paper's, and which known behaviours give the same run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from .behaviours import BEHAVIOURS, apply_to
from .loops import federate, rounds
from .loops.run import Task, Trace
from .model import Params

TOLERANCE = 1e-4
"""Runs agree if no parameter differs by more; it changes by about 1, and 32 bits cost some 1e-6."""
TOGETHER = 5
"""At most so many behaviours are tried together."""


@dataclass(frozen=True)
class Verdict:
    """What the comparison found; rounds, clients and steps count from 1 in its texts, from 0 in its fields.

    `round`, `client` and `step` say where the runs first differ: without a client, in the server's new
    model; `counts` are the steps taken there by the implementation and by the paper, if these differ.
    `behaviours` are the smallest sets that give the same run, the empty one for a run that agrees.
    """

    method: str
    largest: float
    round: int | None = None
    client: int | None = None
    step: int | None = None
    counts: tuple[int, int] | None = None
    behaviours: tuple[tuple[str, ...], ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the run is the paper's."""
        return self.behaviours == ((),)

    @property
    def text(self) -> str:
        """The finding in words."""
        if self.agrees:
            return f"agrees with the paper (largest difference {self.largest:.1e})"
        assert self.round is not None
        where = f"in round {self.round + 1}, "
        if self.counts:
            there, here = self.counts
            where += f"client {self.client + 1} takes {there} steps and the paper {here}"  # type: ignore[operator]
        elif self.client is not None:
            where += f"client {self.client + 1}, step {self.step + 1}"  # type: ignore[operator]
        else:
            where += "in the server's step"
        text = f"leaves the paper {where} (largest difference {self.largest:.2g}); "
        if not self.behaviours:
            return text + "equals no known behaviour"
        sets = (
            " and ".join(f"{name}: it {BEHAVIOURS[name].says}" for name in names)
            for names in self.behaviours
        )
        return text + "equals " + ", or ".join(sets)


def judge(
    task: Task, method: str, result: Mapping[str, Any], tolerance: float = TOLERANCE
) -> Verdict:
    """Compare a driver's result (`host.write_result`) with the paper, then with known behaviours.

    Raises ValueError for a result that lacks rounds or parameters, or has others.
    """
    found = Trace(list(result["models"]), dict(result.get("points") or {}))
    paper = federate(task, method)
    _check(task, paper, found)
    largest = _largest(paper, found)
    where = _first(rounds(task, method), found, tolerance)
    if where is None:
        return Verdict(method, largest, behaviours=((),))
    names = apply_to(method, momentum=task.momentum, lr_decay=task.lr_decay)
    for size in range(1, TOGETHER + 1):
        same = tuple(
            chosen
            for chosen in combinations(names, size)
            if _first(rounds(task, method, chosen), found, tolerance) is None
        )
        if same:
            return Verdict(method, largest, *where, behaviours=same)
    return Verdict(method, largest, *where)


def _check(task: Task, paper: Trace, found: Trace) -> None:
    if len(found.models) != len(paper.models):
        raise ValueError(f"the driver returned {len(found.models)} rounds, not {len(paper.models)}")
    points = [point for visited in found.points.values() for point in visited]
    for models, like in ((found.models, paper.models[0]), (points, task.parameters)):
        want = {name: np.shape(a) for name, a in like.items()}
        for model in models:
            if (got := {name: np.shape(a) for name, a in model.items()}) != want:
                raise ValueError(f"the driver returned parameters {got}, not {want}")


def _apart(a: Params, b: Params) -> float:
    """Return the largest difference; infinite if it is not a number."""
    found = np.max([np.abs(a[name] - b[name]).max() for name in a])  # a NaN stays one
    return float(found) if np.isfinite(found) else float("inf")


def _largest(paper: Trace, found: Trace) -> float:
    return max(_apart(a, b) for a, b in zip(paper.models, found.models, strict=True))


def _first(
    paper: Iterable[tuple[Params, dict[int, list[Params]]]], found: Trace, tolerance: float
) -> tuple[int, int | None, int | None, tuple[int, int] | None] | None:
    """Return where two runs first differ: round, client, step and the numbers of steps; or None.

    `paper` are `rounds`. Points are compared if the driver gave any.
    """
    for t, (model, points) in enumerate(paper):
        for k, visited in points.items():
            if not found.points:
                break
            there = found.points.get((t, k), [])
            for s, (a, b) in enumerate(zip(visited, there, strict=False)):
                if _apart(a, b) > tolerance:
                    return t, k, s, None
            if len(visited) != len(there):
                return t, k, None, (len(there), len(visited))
        if _apart(model, found.models[t]) > tolerance:
            return t, None, None, None
    return None
