"""A fair comparison: methods tuned with as many trials each on held-out data, then tested over seeds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.report import rows
from flwr_regs.experiments.report.results import Results, write
from flwr_regs.experiments.report.run_records import Run
from flwr_regs.experiments.run.engine import PLAN, Plan
from flwr_regs.experiments.settings.build import with_argument
from flwr_regs.experiments.settings.calls import literal, parse_methods, values
from flwr_regs.experiments.settings.job import Job
from flwr_regs.experiments.settings.settings import DEFAULTS, read
from flwr_regs.wire.config import nearest

HELD_OUT = 0.2
"""The share of each client's data that tuning measures on, unless held-out-share says otherwise."""
FIXED = ("methods", "seed", "out", "code-dir", "data-dir", "held-out-clients", "held-out-share")
"""Settings that no trial may change."""


@dataclass(frozen=True)
class Space:
    """What is tried for one setting, such as ``lr``, or one method's parameter, such as ``FedFOR.alpha``.

    Attributes
    ----------
    key : str
    low, high : float or None
        A range, in which the logarithm is uniform.
    choices : tuple of str
        Or these values.
    """

    key: str
    low: float | None
    high: float | None
    choices: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> Space:
        """Return the space of ``lr=0.02..2`` or ``lr=0.1,0.2``; ValueError for other text."""
        key, equals, given = (part.strip() for part in text.partition("="))
        low, dots, high = given.partition("..")
        if not equals or not key or not given:
            raise ValueError(
                f"--tune must look like lr=0.02..2 or FedFOR.alpha=0.1,1, not '{text}'"
            )
        if "." not in key and key not in DEFAULTS:
            raise ValueError(f"--tune {text}: unknown setting '{key}'{nearest(key, DEFAULTS)}")
        if key in FIXED:
            raise ValueError(f"--tune {text}: the setting '{key}' cannot be tuned")
        if not dots:
            return cls(key, None, None, tuple(values(given)))
        try:
            ends = float(low), float(high)
        except ValueError:
            ends = (0.0, 0.0)
        if not 0 < ends[0] < ends[1]:
            raise ValueError(
                f"--tune {text}: a range is LOW..HIGH, two numbers with 0 < LOW < HIGH"
            )
        return cls(key, *ends)

    def at(self, share: float) -> str:
        """Return the value at a share of the space, from 0 up to 1."""
        if self.low is None or self.high is None:
            return self.choices[int(share * len(self.choices))]
        value = self.low * (self.high / self.low) ** share
        return f"{value:.0f}" if type(DEFAULTS.get(self.key)) is int else f"{value:.3g}"

    def applies(self, method: str) -> bool:
        """Return whether a method has what this is about."""
        target, dot, _ = self.key.rpartition(".")
        (calls,) = parse_methods(method).values()
        return not dot or target in [call.target for call in calls]


@dataclass(frozen=True)
class Bench:
    """A tuned comparison.

    Attributes
    ----------
    settings : dict
        By name; what differs from the defaults. ``methods`` are the ones to compare, the first one being
        the baseline.
    tune : tuple of str
        See :meth:`Space.read`.
    trials : int
        Settings that are tried for each method; fewer only where it has fewer choices.
    seeds, tuning_seeds : tuple of int
        Of the test, and of tuning. No seed may be in both.
    own : dict
        Method -> settings of its own, which are not tuned for it.
    """

    settings: Mapping[str, Any]
    tune: tuple[str, ...]
    trials: int
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.spaces) > len({space.key for space in self.spaces}):
            raise ValueError(f"--tune names a key twice: {', '.join(self.tune)}")
        if self.settings.get("held-out-clients"):
            raise ValueError(
                "bench tests on the test set and tunes on held-out-share: leave held-out-clients out"
            )
        if self.trials < 1:
            raise ValueError(f"--trials must be at least 1, not {self.trials}")
        if both := {*self.seeds} & {*self.tuning_seeds}:
            raise ValueError(f"seeds {sorted(both)} are both for tuning and for the test")
        for space in self.spaces:
            if not any(map(space.applies, self.methods)):
                raise ValueError(f"--tune {space.key}: none of {', '.join(self.methods)} has this")

    @cached_property
    def methods(self) -> list[str]:
        """The methods to compare."""
        return list(parse_methods(str(self.settings.get("methods", DEFAULTS["methods"]))))

    @cached_property
    def labels(self) -> dict[str, str]:
        """Row -> method. A row's name leaves out what is tuned, unless two rows had the same then."""
        tuned = {space.key for space in self.spaces}
        names = []
        for method in self.methods:
            (calls,) = parse_methods(method).values()
            untuned = [
                {k: v for k, v in call.kwargs.items() if f"{call.target}.{k}" not in tuned}
                for call in calls
            ]
            parts = [replace(c, kwargs=kw) for c, kw in zip(calls, untuned, strict=True)]
            names.append("+".join(map(str, parts)))
        return {
            name if names.count(name) == 1 else method: method
            for name, method in zip(names, self.methods, strict=True)
        }

    @cached_property
    def spaces(self) -> list[Space]:
        """What is tried."""
        return [Space.read(text) for text in self.tune]

    def trials_of(self, method: str) -> list[dict[str, str]]:
        """Return the points that are tried for a method: key -> value, spread evenly (Sobol's sequence)."""
        from torch.quasirandom import SobolEngine

        fixed = self.own.get(method, {})
        spaces = [s for s in self.spaces if s.applies(method) and s.key not in fixed]
        if not spaces:
            return [{}]
        keys = [space.key for space in spaces]
        grid = list(product(*(space.choices for space in spaces)))
        if not 0 < len(grid) <= self.trials:  # else the whole grid
            engine = SobolEngine(len(spaces), scramble=True, seed=0)  # type: ignore[no-untyped-call]
            shares = engine.draw(8 * self.trials).tolist()  # whole numbers and choices come twice
            grid = [tuple(s.at(x) for s, x in zip(spaces, point, strict=True)) for point in shares]
        different = [*dict.fromkeys(grid)][: self.trials]
        return [dict(zip(keys, values, strict=True)) for values in different]

    def job(self, method: str, point: Mapping[str, str], seed: int, tuning: bool) -> Job:
        """Return the job of a method at a point of its space."""
        own = self.own.get(method, {})
        settings: dict[str, Any] = {**self.settings, **own, "methods": method, "seed": seed}
        share = settings.pop("held-out-share", HELD_OUT)
        folder = str(settings.get("code-dir") or os.getcwd())
        for key, value in point.items():
            target, dot, name = key.rpartition(".")
            if dot:
                called = with_argument(settings["methods"], target, name, literal(value), folder)
                settings["methods"] = called
            else:
                settings[key] = read(key, value)
        if tuning:  # the test is on other data than tuning
            settings["held-out-share"] = share
        return Job.checked(settings)

    def tuning(self) -> Plan:
        """Return the plan of the trials."""
        return Plan.fair(
            [
                (_label(row, point), self.job(method, point, seed, tuning=True))
                for row, method in self.labels.items()
                for point in self.trials_of(method)
                for seed in self.tuning_seeds
            ],
            "trial",
        )

    @property
    def untuned(self) -> dict[str, dict[str, str]]:
        """Row -> the point of a method that nothing is tuned for."""
        return {row: {} for row in self.labels}

    def check(self) -> None:
        """Raise ValueError or OSError for what can be known to be impossible before anything trains."""
        if self.spaces:
            self.tuning().check()
        self.test(self.untuned).check()

    def chosen(self, runs: Sequence[Run]) -> dict[str, dict[str, str]]:
        """Return row -> the point with the highest mean of the last five rounds on held-out data.

        A point of which a run diverged is not chosen. RuntimeError if a method has no other.
        """
        best = {}
        for row, method in self.labels.items():
            tried = self.trials_of(method)
            scores = []
            for point in tried:
                of_point = [r for r in runs if r.label == _label(row, point)]
                good = of_point and not any(r.error for r in of_point)
                scores.append(float(np.mean([rows.last(r) for r in of_point])) if good else -1.0)
            if max(scores) < 0:
                raise RuntimeError(
                    f"{row}: every one of its {len(scores)} trials failed or diverged"
                )
            best[row] = tried[int(np.argmax(scores))]
        return best

    def test(self, chosen: Mapping[str, Mapping[str, str]]) -> Plan:
        """Return the plan of the test, each method with what tuning chose."""
        plan = Plan.fair(
            [
                (row, self.job(self.labels[row], point, seed, tuning=False))
                for row, point in chosen.items()
                for seed in self.seeds
            ]
        )
        tried = {row: len(self.trials_of(self.labels[row])) for row in chosen}
        return replace(plan, more={"chosen": chosen, "trials": tried})

    def notes(self, chosen: Mapping[str, Mapping[str, str]]) -> list[str]:
        """Say what tuning chose, and where that is at the edge of what was tried."""
        said: list[str] = []
        for row, point in chosen.items() if self.spaces else ():
            tried = self.trials_of(self.labels[row])
            best = ", ".join(f"{key} = {value}" for key, value in point.items())
            said.append(
                f"{row}: {best or 'nothing to tune'}; the best of {len(tried)} on held-out data"
            )
            for key, value in point.items():
                with suppress(ValueError):  # not a number
                    every = [float(other[key]) for other in tried]
                    if len(tried) > 2 and float(value) in (min(every), max(every)):
                        said[-1] += f" ({key} is at the edge of what was tried)"
        return said

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write what is benchmarked into its folder."""
        write(folder / "bench.json", json.dumps({**provenance, "bench": asdict(self)}, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Bench:
        """Return what is benchmarked in a folder; ValueError if there is nothing."""
        path = folder / "bench.json"
        if not path.is_file():
            raise ValueError(f"{folder} holds no benchmark: it has no bench.json")
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))["bench"]
            given: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in kept.items()
            }
            return cls(**given)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged, or of another version: {error!r}") from error

    @staticmethod
    def provenance(folder: Path) -> dict[str, Any]:
        """Return what produces a benchmark's folder."""
        kept = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
        return {k: v for k, v in kept.items() if k != "bench"}

    @classmethod
    def kept(cls, folder: Path) -> Results:
        """Return the results in a benchmark's folder; ValueError if its test has not begun."""
        if not (folder / PLAN).is_file():
            raise ValueError(
                f"{folder} is still tuning: go on with flwr-regs bench --resume {folder}"
            )
        plan = Plan.load(folder)
        return plan.results(folder, cls.load(folder).notes(plan.more["chosen"]), baseline=True)


def _label(row: str, point: Mapping[str, str]) -> str:
    return f"{row} [{', '.join(f'{key}={value}' for key, value in point.items())}]"
