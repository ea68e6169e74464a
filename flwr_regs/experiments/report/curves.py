"""The runs that pictures are drawn from, and their means over seeds. numpy only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Curve:
    """One run: one method, one seed.

    Attributes
    ----------
    label : the method, or a sweep's value; the runs of one label are its seeds
    seed : the run's seed
    rounds : the rounds with a measured accuracy, increasing; round 0 is the untrained model
    accuracy : fractions, one for each of `rounds`; may hold NaN
    megabytes : 10^6 bytes down and up until the end of each of `rounds`, per client of the population
    seconds : training time until the end of each of `rounds`
    clients : each client's accuracy (a fraction) with the final model; empty if not measured
    stopped : why the run diverged or failed after the last of `rounds`; empty if it did not

    Raises ValueError if the lengths differ or the rounds do not increase.
    """

    label: str
    seed: int
    rounds: Sequence[int]
    accuracy: Sequence[float]
    megabytes: Sequence[float]
    seconds: Sequence[float]
    clients: Sequence[float] = ()
    stopped: str = ""

    def __post_init__(self) -> None:
        for name in ("accuracy", "megabytes", "seconds"):
            if len(getattr(self, name)) != len(self.rounds):
                raise ValueError(
                    f"run {self.label!r}, seed {self.seed}: {name} has {len(getattr(self, name))} values "
                    f"for {len(self.rounds)} rounds: expected one for each round"
                )
        if any(b <= a for a, b in zip(self.rounds, self.rounds[1:], strict=False)):
            raise ValueError(f"run {self.label!r}, seed {self.seed}: rounds must increase")

    @property
    def broken(self) -> bool:
        """Whether the run stopped, measured nothing, or has an accuracy that is not finite."""
        return bool(self.stopped) or not len(self.rounds) or not np.isfinite(self.accuracy).all()


@dataclass(frozen=True)
class Method:
    """The runs of one label: whole ones, which are averaged, and broken ones."""

    label: str
    whole: list[Curve]
    broken: list[Curve]

    @property
    def text(self) -> str:
        """The label, with the number of stopped runs if there are any."""
        return f"{self.label} {self.count}" if self.broken else self.label

    @property
    def count(self) -> str:
        return f"({len(self.broken)} of {len(self.whole) + len(self.broken)} stopped)"


def group(curves: Sequence[Curve]) -> list[Method]:
    """Return the curves by label, in the order of the labels' first runs."""
    if not curves:
        raise ValueError("there are no curves to draw: expected at least one run")
    for (label, seed), count in Counter((c.label, c.seed) for c in curves).items():
        if count > 1:
            raise ValueError(
                f"{label!r} has {count} runs with seed {seed}: expected one for each seed"
            )
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.label, []).append(curve)
    return [
        Method(label, [c for c in runs if not c.broken], [c for c in runs if c.broken])
        for label, runs in groups.items()
    ]


def mean_over_seeds(method: Method, x: str) -> tuple[Array, Array, Array]:
    """Return x, mean and sample deviation (accuracies in per cent) by round, over a method's whole runs."""
    rounds = set.intersection(*(set(c.rounds) for c in method.whole))
    if not rounds:
        raise ValueError(f"the runs of {method.label!r} have no round in common")
    kept = [[i for i, r in enumerate(c.rounds) if r in rounds] for c in method.whole]
    across = [
        np.asarray(positions(c, x), float)[i] for c, i in zip(method.whole, kept, strict=True)
    ]
    up = 100 * np.array(
        [np.asarray(c.accuracy)[i] for c, i in zip(method.whole, kept, strict=True)]
    )
    deviation = up.std(axis=0, ddof=1) if len(up) > 1 else np.zeros(up.shape[1])
    return np.mean(across, axis=0), up.mean(axis=0), deviation


def positions(curve: Curve, x: str) -> Sequence[float]:
    """Return a run's x values: its rounds, or the field of the name `x`."""
    values: Sequence[float] = getattr(curve, "rounds" if x == "round" else x)
    if not np.isfinite(values).all():
        raise ValueError(
            f"run {curve.label!r}, seed {curve.seed}: {x} holds values that are not finite"
        )
    return values


def seeds_in_words(methods: Sequence[Method]) -> str:
    """Return the caption's words on n: the usual n, and the methods that have another."""
    numbers = {m.label: len(m.whole) for m in methods if m.whole}
    if not numbers:
        return ""
    usual = max(Counter(numbers.values()).items(), key=lambda item: (item[1], item[0]))[0]
    others: dict[int, list[str]] = {}
    for label, n in numbers.items():
        if n != usual:
            others.setdefault(n, []).append(label)
    rest = "; ".join(f"{', '.join(labels)}: n = {n}" for n, labels in others.items())
    return f"n = {usual} seed{'s' * (usual > 1)}" + (f" ({rest})" if rest else "")
