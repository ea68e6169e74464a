"""From calls to strategies and clients.

A part of a method is one of the package's strategies (`FedFOR`) or terms (`SparseTernary`), or a reference
to a user's own (``mine.py:name``): a Strategy or Term class, a term, a list of terms, or a function that
returns a strategy, a term or a list of terms.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from inspect import Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flwr_regs
from flwr_regs.abilities import Compresses, FineTunes, Personalises, Steps, Withholds
from flwr_regs.experiments.calls import (
    OUTSIDE,
    REFERENCES,
    Call,
    Calls,
    catalogue,
    check_name,
    text_of,
)
from flwr_regs.experiments.user_code import HERE, load, said
from flwr_regs.methods.registry import HOMES, METHODS
from flwr_regs.server.options import Options
from flwr_regs.server.refusals import check_ranges
from flwr_regs.term import Term
from flwr_regs.wire.config import nearest
from flwr_regs.wire.errors import OURS, place

if TYPE_CHECKING:
    from flwr_regs import RegStrategy

SHARED = ("weighting", "incomplete", "downlink")
"""The settings that a composition takes from its strategies, if nobody gives them."""
VALUES = (
    *("CenteredClipping", "CoordinateMedian", "GeometricMedian", "Krum", "Mean", "NormBound"),
    *("TrimmedMean", "CentralDP", "Patience", "Target"),
)
"""The calls that an argument of a method may be."""
HEAVY = re.compile(r"torch|flwr(?!_)|flwr_regs\.(client|cohort|flower|wire\.records)\b")
"""Modules that load torch or Flower; a light class knows nothing of them."""
LIGHT = re.compile(r"flwr_regs\.(methods\.(?!registry)|flower\.strategy)")
"""Modules whose classes have a light form."""


def light(name: str) -> Any:
    """Return the light form of a strategy or a term; ValueError for another name.

    A light class is made from the source of the real one, without what needs torch or Flower, which take
    seconds to load. So it cannot train; but it takes the same arguments, and refuses what the real one
    refuses.
    """
    if name == "RegStrategy":
        return _defined("flwr_regs.flower.strategy")[name]
    if name not in catalogue():
        missing = f"there is no method '{name}'{nearest(name, catalogue())}"
        raise ValueError(OUTSIDE.get(name, missing))
    file = METHODS[name].module if name in METHODS else HOMES[name]
    return _defined(f"flwr_regs.methods.{file}")[name]


@lru_cache
def _defined(module: str) -> dict[str, Any]:
    """Return what a module defines, as far as that needs neither torch nor Flower."""
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    known: dict[str, Any] = {"__name__": Term.__module__}  # where a dataclass finds its ClassVar
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        imported = ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = getattr(node, "module", "") or node.names[0].name
        if isinstance(node, ast.ImportFrom) and LIGHT.match(imported):
            given = _defined(imported)
            known |= {alias.name: given[alias.name] for alias in node.names if alias.name in given}
        elif not HEAVY.match(imported):
            if isinstance(node, ast.ClassDef):
                node.bases = [base for base in node.bases if ast.unparse(base) in known]
            with suppress(NameError):  # it needs torch
                exec(compile(ast.Module([node], []), str(path), "exec"), known)
    return known


def build(calls: Calls, folder: str = "", only_check: bool = False, **common: Any) -> RegStrategy:
    """Return the strategy of a method's parts.

    Several parts become one list of terms. Those that compress come last, those that read the update come
    behind those that shift the start, those that change the mean behind a server's optimiser. Weighting,
    downlink and treatment of incomplete clients are those of the first strategy that has another than the
    usual one: FedBN+SCAFFOLD weighs as SCAFFOLD does.

    Parameters
    ----------
    calls : sequence of Call
        The parts. Beside its own parameters, each takes the settings of every strategy.
    folder : str
        Where references begin, see :func:`flwr_regs.experiments.user_code.load`.
    only_check : bool
        Whether the strategy is made of the light classes, so that nothing loads torch or Flower: it cannot
        train. Beside a user's own parts, all are whole. NameError if what is to be checked needs torch.
    **common
        Settings of the strategy. What a call says wins, and what a function's strategy has changed, but for
        its seed.

    Raises
    ------
    ValueError
        With the text of the part in front: an unknown name, a wrong, missing or unknown argument; or parts
        that do not compose.
    """
    own = [call for call in calls if ":" in call.target]
    for call in own:  # a file that is not there is named before torch loads
        with named(str(call)):
            find(call, folder)
    of = light if only_check and not own else partial(getattr, flwr_regs)
    base: type[RegStrategy] = of("RegStrategy")
    terms: list[Term] = []
    given: dict[str, Any] = {}  # by the calls themselves
    shared: dict[str, Any] = {}  # by the strategies
    settings = {k: v for k, v in common.items() if k in Options.names()}
    extra = {k: v for k, v in common.items() if k not in settings}
    several = len(calls) > 1
    if several and (alone := [c.target for c in calls if c.target in REFERENCES]):
        raise ValueError(f"'{text_of(calls)}': {alone[0]} is no method; it goes with nothing")
    for call in calls:
        check_name(call)
        with named(str(call)):
            call = with_values(call)
            of_every = {k: v for k, v in call.kwargs.items() if k in Options.names()}
            drawn = {"seed", "lr_schedule"}  # None is their default
            check_ranges({k: v for k, v in of_every.items() if v is not None or k not in drawn})
            kind = find(call, folder, of)
            is_strategy = isinstance(kind, type) and issubclass(kind, base)
            for name, value in of_every.items():
                if given.setdefault(name, value) != value:
                    raise ValueError(f"another part says {name}={given[name]!r}: give it once")
            if is_strategy:
                made = _made(kind, call, call.kwargs, extra if several else common)
            else:
                made = _part(kind, call, extra, base)
            if isinstance(made, list):
                terms += made
                if call.target == "SparseTernary" and not (call.args or call.kwargs):
                    hint = "give density_up=0.1, density_down=0.1, or both"
                    raise ValueError(f"it sends everything as it is: {hint}")
                continue
            if not several:
                return made if is_strategy else _with(made, settings, of_every)
            chosen = {name: getattr(made, name) for name in SHARED}
            shared = {k: v for k, v in chosen.items() if v != getattr(Options, k)} | shared
            terms += made.term.terms
    with named(text_of(calls)):
        return base(sorted(terms, key=_place), **{**shared, **settings, **given})


def check_apart(methods: Mapping[str, Calls], folder: str) -> dict[str, RegStrategy]:
    """Return label -> strategy without settings, after a check that clients can tell them apart.

    Raises ValueError as :func:`build` does, and if two strategies have one name and different terms.
    """
    from flwr_regs.flower.client import client_class  # loads torch

    made = {label: build(calls, folder) for label, calls in methods.items()}
    clients: dict[str, tuple[str, Any]] = {}
    for label, strategy in made.items():
        terms = client_class(strategy).terms
        other, others = clients.setdefault(strategy.method_name, (label, terms))
        if terms != others:
            both = f"'{other}' and '{label}' are both named '{strategy.method_name}'"
            hint = "give one strategy's class a 'method' of its own"
            raise ValueError(f"{both}, but their terms differ: {hint}")
    return made


def is_private(strategy: RegStrategy) -> bool:
    """Return whether its clients keep entries of the model, so that they alone can test it."""
    return any(isinstance(t, Withholds | Personalises | FineTunes) for t in strategy.term.terms)


def _part(kind: Any, call: Call, extra: Mapping[str, Any], base: type[RegStrategy]) -> Any:
    """Return what a part that is no strategy's class stands for: a strategy, or a list of terms."""
    made = kind
    expected = "a class that derives from RegStrategy, a function that returns a strategy"
    if isinstance(kind, type) and hasattr(kind, "fit"):
        raise TypeError(f"{kind.__name__} is a client's class: name its strategy, or a term")
    if call.called or callable(kind):
        if not callable(kind):
            raise TypeError(f"{kind!r} cannot be called: leave out the parentheses")
        kwargs = {k: v for k, v in call.kwargs.items() if k not in Options.names()}
        made = _made(kind, call, kwargs, extra)
        expected = "a strategy that derives from RegStrategy"
        if isinstance(made, base):
            return made
    terms = list(made) if isinstance(made, list | tuple) else [made]
    if not terms or not all(isinstance(t, Term) for t in terms):
        what = f"a value of type {type(made).__name__}"
        what = f"the class {made.__name__}" if isinstance(made, type) else what
        raise TypeError(f"expected {expected}, a term, or a list of terms, not {what}")
    return terms


def _with(made: RegStrategy, settings: Mapping[str, Any], given: Mapping[str, Any]) -> RegStrategy:
    """Return a function's strategy with the settings that it has not changed, and those of its call."""
    names = Options.names() - {"seed"}
    changed = {n: v for n in names if (v := getattr(made, n)) != getattr(Options, n)}
    made = copy(made)  # the function may return the same one each time
    made.options = Options.of(made.term, **{**settings, **changed, **given})
    return made


def _place(term: Term) -> tuple[bool, bool, bool]:
    """Return what a list of terms is sorted by; see :func:`build`."""
    changes_the_mean = term.acts("update") and not (isinstance(term, Steps) or term.keeps_delta)
    reads_the_update = type(term).finish is not Term.finish and type(term).start is Term.start
    return isinstance(term, Compresses), changes_the_mean, reads_the_update


@contextmanager
def named(text: str) -> Iterator[None]:
    """Put the text of a part or method in front of the error that it raises, which becomes a ValueError."""
    try:
        yield
    except Exception as error:
        if not (plain := isinstance(error, ValueError | TypeError)) and OURS in place(error):
            raise  # no fault of a user's code, such as what a light class lacks
        text = f"'{text}': {error if plain else said(error)}"
        raise ValueError(re.sub(rf"\b{HERE}:", "", text)) from error


def find(call: Call, folder: str = "", of: Callable[[str], Any] = light) -> Any:
    """Return what a call names: a user's own, or what `of` returns; ValueError if there is none."""
    check_name(call)
    if ":" in call.target:
        return load(call.target, folder)
    if call.target in REFERENCES:
        return type(call.target, (of("FedAvg"),), {"method": call.target})
    return of(call.target)


def _made(kind: Any, call: Call, kwargs: Mapping[str, Any], common: Mapping[str, Any] = {}) -> Any:
    """Return what a class or function makes of a call, with those of the `common` arguments that it takes.

    Raises TypeError for an argument of the call that is missing, unknown or too many.
    """
    takes = inspect.signature(kind)
    names = [n for n, p in takes.parameters.items() if p.kind is not p.VAR_KEYWORD]
    known = {*names, *Options.names()}
    try:
        takes.bind(*call.args, **kwargs)
    except TypeError as error:
        row = METHODS.get(call.target)
        example = row.example if row else f"{call.target}({', '.join(n + '=...' for n in names)})"
        odd = [f"; there is no argument '{n}'{nearest(n, known)}" for n in kwargs if n not in known]
        raise TypeError(f"{error}{''.join(odd)}; for example {example}") from None
    # a server optimiser's schedule is a parameter of its own, and no setting of every strategy
    free = known - {*names[: len(call.args)]}
    further = {name: value for name, value in common.items() if name in free}
    return kind(*call.args, **{**further, **kwargs})


def with_values(call: Call) -> Call:
    """Return a call with what its arguments' own calls make: aggregators, privacy, stopping conditions."""

    def made(value: Any) -> Any:
        if not isinstance(value, Call):
            return value
        if value.target not in VALUES:
            known = ", ".join(VALUES)
            raise ValueError(f"an argument may be a call of {known}; not of {value.target}")
        with named(str(value)):
            value = with_values(value)
            return _made(getattr(flwr_regs, value.target), value, value.kwargs)

    kwargs = {name: made(value) for name, value in call.kwargs.items()}
    return replace(call, args=tuple(map(made, call.args)), kwargs=kwargs)


def with_argument(calls: Calls, key: str, value: Any, folder: str = "") -> Calls:
    """Return a method with one argument, such as ``FedFOR.alpha``, replaced or added where it is called."""
    target, _, name = key.rpartition(".")

    def changed(call: Call) -> Call:
        if call.target != target:
            return call
        names: list[str] = []
        if call.args:  # else a user's own code need not be here
            with named(str(call)):
                names = [*of_call(call, folder).parameters][: len(call.args)]
        if name in names:
            at = names.index(name)
            return replace(call, args=(*call.args[:at], value, *call.args[at + 1 :]))
        return replace(call, kwargs={**call.kwargs, name: value}, called=True)

    return tuple(map(changed, calls))


def of_call(call: Call, folder: str = "") -> Signature:
    """Return what the class or function of a call takes; a term, or a list of terms, takes nothing."""
    thing = find(call, folder)
    return inspect.signature(thing) if callable(thing) else Signature()
