"""What tuning tries: for a setting, such as ``lr``, or a method's parameter, such as ``FedFOR.alpha``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, log2, prod, sqrt
from typing import Any

from flwr_regs.experiments.calls import Call, literal, values
from flwr_regs.experiments.settings import DEFAULTS, FIELD_KEYS, PLACES, PROBLEM, read
from flwr_regs.wire.config import nearest

FIXED = (*PLACES, *PROBLEM, "methods", "seed", "rounds", "held-out-clients", "held-out-share")
"""Settings that no trial may change."""
Point = Mapping[str, Any]
"""Key -> value: a setting, or a parameter of a method."""


@dataclass(frozen=True)
class Space:
    """What is tried for one key.

    Attributes
    ----------
    text : str
        As it was given.
    key : str
    low, high : float
        A range, in which the logarithm is uniform.
    choices : tuple
        Or these values.
    """

    text: str = field(compare=False)
    key: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Any, ...] = ()

    @classmethod
    def read(cls, text: str) -> Space:
        """Return the space of ``lr=0.02..2`` or ``lr=0.1,0.2``; ValueError for other text."""
        key, equals, given = (part.strip() for part in text.partition("="))
        low, dots, high = given.partition("..")
        if not equals or not key or not given:
            raise ValueError(f"--tune must look like lr=0.02..2 or FedFOR.alpha=1,2, not '{text}'")
        key = FIELD_KEYS.get(key, key)
        if "." not in key and key not in DEFAULTS:
            hint = f"{nearest(key, DEFAULTS)} (a method's parameter is FedFOR.{key}, say)"
            raise ValueError(f"--tune {text}: unknown setting '{key}'{hint}")
        if key in FIXED:
            raise ValueError(f"--tune {text}: the setting '{key}' cannot be tuned")
        if not dots:
            try:
                tried = [literal(one) if "." in key else read(key, one) for one in values(given)]
            except ValueError as error:
                forms = "a range is LOW..HIGH, values are A,B,C"
                raise ValueError(f"--tune {text}: {error}; {forms}") from error
            if any(one in tried[:place] for place, one in enumerate(tried)):
                raise ValueError(f"--tune {text} has a value twice")
            return cls(text, key, choices=tuple(tried))
        with suppress(ValueError):
            if 0 < float(low) < float(high):
                return cls(text, key, float(low), float(high))
        raise ValueError(f"--tune {text}: a range is LOW..HIGH, two numbers with 0 < LOW < HIGH")

    def at(self, share: float) -> Any:
        """Return the value at a share of the space, from 0 up to 1."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        value = self.low * (self.high / self.low) ** share
        return round(value) if type(DEFAULTS.get(self.key)) is int else float(f"{value:.3g}")

    def beyond(self, top: bool) -> Space:
        """Return the range above this one, or below it, half as wide in the logarithm."""
        half = sqrt(self.high / self.low)
        if top:
            return replace(self, low=self.high, high=self.high * half)
        return replace(self, low=self.low / half, high=self.low)

    def applies(self, calls: Iterable[Call]) -> bool:
        """Return whether a method has what this is about."""
        target, dot, _ = self.key.rpartition(".")
        return not dot or target in [call.target for call in calls]


def read_spaces(texts: Iterable[str], where: str) -> tuple[Space, ...]:
    """Return the spaces of some texts; ValueError, with `where` they stand, for a key named twice."""
    spaces = tuple(map(Space.read, texts))
    if len(spaces) > len({space.key for space in spaces}):
        raise ValueError(f"{where} names a key twice: {', '.join(s.text for s in spaces)}")
    return spaces


def points(spaces: Sequence[Space], trials: int) -> list[Point]:
    """Return different points that are tried: the whole grid if it is small, else Sobol's sequence."""
    grid = [*product(*(space.choices for space in spaces))]
    if not is_grid(spaces, trials):
        from scipy.stats import qmc

        engine = qmc.Sobol(len(spaces), rng=0)
        shares = engine.random_base2(3 + ceil(log2(trials)))  # whole numbers and choices come twice
        grid = [tuple(s.at(x) for s, x in zip(spaces, point, strict=True)) for point in shares]
    tried: dict[str, Point] = {}
    for one in grid:
        point = dict(zip((space.key for space in spaces), one, strict=True))
        tried.setdefault(shown(point), point)
    return list(tried.values())[:trials]


def is_grid(spaces: Sequence[Space], trials: int) -> bool:
    """Return whether all combinations of values are tried: they are few."""
    return 0 < grid_size(spaces) <= trials


def grid_size(spaces: Sequence[Space]) -> int:
    """Return how many combinations of values there are; 0 if one space is a range."""
    return prod(len(space.choices) for space in spaces)


def edges(point: Point, tried: Sequence[Point]) -> dict[str, bool]:
    """Return the keys of which a point has the smallest or largest number tried: key -> is it the largest.

    Two values have no inside.
    """
    found = {}
    for key, value in point.items():
        every = [other[key] for other in tried]
        numbers = all(type(one) in (int, float) for one in every)
        if numbers and len({*every}) > 2 and value in (min(every), max(every)):
            found[key] = value == max(every)
    return found


def shown(point: Point, equals: str = "=") -> str:
    """Return a point as text."""
    short = (
        f"{v:g}" if type(v) is float and float(f"{v:g}") == v else f"{v}" for v in point.values()
    )
    return ", ".join(f"{key}{equals}{text}" for key, text in zip(point, short, strict=True))
