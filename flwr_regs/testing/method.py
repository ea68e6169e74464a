"""What is checked: a method with its settings, its oracle, and the laws that it is exempt from; and a law.

A law is a sentence, a check that raises where it is broken, and the verdict for a method.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from flwr_regs.abilities import Compresses
from flwr_regs.flower.client import RegClient
from flwr_regs.flower.strategy import RegStrategy
from flwr_regs.server.options import Options
from flwr_regs.term import Term

Oracle = Callable[..., Sequence[Mapping[str, np.ndarray]]]
Strategy = Callable[..., RegStrategy] | RegStrategy
Model = Mapping[str, Any]


class LawBroken(AssertionError):
    """A law does not hold; the message says which, what was expected, what was found, and where."""


class Skipped(Exception):
    """A law does not apply; the message says why."""


@dataclass(frozen=True)
class Exempt:
    """Why a law does not hold for a method; the exemption is checked as well.

    Parameters
    ----------
    why : str
        A sentence of at least four words; ValueError otherwise.
    refusal : str, optional
        A pattern of the error with which the method refuses to run. None: it runs, and breaks the law.
    """

    why: str
    refusal: str | None = None

    def __post_init__(self) -> None:
        if len(self.why.split()) < 4:
            raise ValueError(f"an exemption needs a sentence that says why, not {self.why!r}")


@dataclass(frozen=True, eq=False)
class Method:
    """A method under test; the parameters are those of :func:`flwr_regs.testing.check_method`."""

    strategy: Strategy
    client: Callable[..., Any] | None
    terms: Sequence[Term]
    oracle: Oracle | None = None
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] | RegStrategy | None = None
    neutral_is_exact: bool = False
    oracle_settings: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-10
    fixed_point: Callable[..., float] | None = None
    settling: Mapping[str, Any] = field(default_factory=dict)
    exempt: Mapping[str, Exempt] = field(default_factory=dict)

    def build(self, **options: Any) -> RegStrategy:
        """Return the strategy with its settings and these `options`."""
        return _built(self.strategy, {**self.settings, **options})

    def build_neutral(self, **options: Any) -> RegStrategy:
        """Return the neutral strategy."""
        if isinstance(self.neutral, RegStrategy):
            return _built(self.neutral, options)
        return _built(self.strategy, {**(self.neutral or {}), **options})

    def make_client(self, *data: Any, **settings: Any) -> Any:
        """Return a client; without a client of its own, a RegClient of the terms."""
        return (self.client or _composed(self.terms))(*data, **settings)

    def beside(
        self, other: Term, first: bool = False, **options: Any
    ) -> tuple[RegStrategy, Callable[..., Any]]:
        """Return strategy and client of the method chained with `other`, first or last.

        A term that compresses stays behind it.
        """
        terms = [other, *self.terms] if first else [*self.terms, other]
        terms.sort(key=lambda term: isinstance(term, Compresses))
        chosen = self.build().options
        kept = {name: getattr(chosen, name) for name in Options.names()}
        return RegStrategy(terms, **{**kept, **options}), _composed(terms)


def _composed(terms: Sequence[Term]) -> Callable[..., Any]:
    return partial(RegClient, terms=[type(t) for t in terms if not t.server_only])


def _built(strategy: Strategy, settings: Mapping[str, Any]) -> RegStrategy:
    if not isinstance(strategy, RegStrategy):
        return strategy(**settings)
    made = copy.copy(strategy)  # `start` gives it a training of its own
    made.options = replace(strategy.options, **settings)
    return made


def agree(actual: Model, expected: Model, tolerance: float, where: str) -> None:
    """Raise LawBroken naming the entry that is furthest off, unless all are within `tolerance`."""
    if actual.keys() != expected.keys():
        raise LawBroken(f"{where}: arrays {sorted(actual)}, expected {sorted(expected)}")
    for name in expected:
        a, b = (np.asarray(x[name], dtype=np.float64) for x in (actual, expected))
        if a.shape != b.shape:
            raise LawBroken(f"{where}: '{name}' has shape {a.shape}, expected {b.shape}")
        off = np.nan_to_num(np.where(a == b, 0.0, np.abs(a - b)), nan=np.inf, posinf=np.inf)
        if off.max(initial=0.0) > tolerance:
            i = np.unravel_index(off.argmax(), off.shape)
            entry = "".join(f"[{n}]" for n in i)
            found = f"{a[i]:.12g}, expected {b[i]:.12g} (tolerance {tolerance:g})"
            raise LawBroken(f"{where}: '{name}'{entry} is {found}")


def by_round(actual: Sequence[Model], expected: Sequence[Model], tolerance: float) -> None:
    """Raise LawBroken at the first round whose models differ."""
    if len(actual) != len(expected):
        raise LawBroken(f"{len(actual)} rounds, expected {len(expected)}")
    for t, (a, b) in enumerate(zip(actual, expected, strict=True), start=1):
        agree(a, b, tolerance, f"after round {t}")


@dataclass(frozen=True, eq=False)
class Law:
    """A law: its name, its sentence, its check, and the variants in which it is checked.

    ``check(method)``, or ``check(method, variant)``, raises where the law is broken. A law without variants
    has the variant "".
    """

    name: str
    sentence: str
    check: Callable[..., None]
    variants: Sequence[str]

    def judge(self, method: Method, variant: str = "") -> str:
        """Return ``"passed"``, ``"skipped: <why>"`` or ``"exempt: <why>"``; raise LawBroken otherwise."""
        at = f"law '{self.name}{f'/{variant}' if variant else ''}' ({self.sentence})"
        broken: Exception | None = None
        try:
            self.check(method, *filter(None, [variant]))
        except Skipped as why:
            return f"skipped: {why}"
        except Exception as error:  # a refusal, or whatever the method raises
            broken = error
        exempt = method.exempt.get(self.name) or method.exempt.get(f"{self.name}/{variant}")
        found = isinstance(broken, LawBroken)
        raised = str(broken) if found else f"{type(broken).__name__}: {broken}"
        if exempt is None:
            if broken is None:
                return "passed"
            what = "" if found else "it could not be checked, because the method failed: "
            raise LawBroken(f"{at}: {what}{raised}") from broken
        if broken is None:
            but = "meets it: leave out the exemption"
        elif exempt.refusal is None and not found:
            but = f"does not run; name the `refusal`: {raised}"
        elif exempt.refusal and (found or not re.search(exempt.refusal, str(broken))):
            but = f"not refused with '{exempt.refusal}': {raised}"
        else:
            return f"exempt: {exempt.why}"
        at += f": the method is exempt from it (“{exempt.why}”), but"
        raise LawBroken(f"{at} {but}") from broken


def law(sentence: str, *variants: str) -> Callable[[Callable[..., None]], Law]:
    """Return what makes a check a law, which is named as the check is."""
    return lambda check: Law(check.__name__.replace("_", "-"), sentence, check, variants or ("",))
