"""What a part of a method takes, and calls with other arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import Signature
from typing import Any

import flwr_regs
from flwr_regs.experiments.calls import REFERENCES, Call, check_name
from flwr_regs.experiments.light_classes import light
from flwr_regs.experiments.user_code import load
from flwr_regs.methods.registry import METHODS
from flwr_regs.server.options import Options
from flwr_regs.wire.config import nearest

VALUES = (
    *("CenteredClipping", "CoordinateMedian", "GeometricMedian", "Krum", "Mean", "NormBound"),
    *("TrimmedMean", "CentralDP", "Patience", "Target"),
)
"""The calls that an argument of a method may be."""


@contextmanager
def named(text: str) -> Iterator[None]:
    """Put the text of a part or method in front of the error that it raises, which becomes a ValueError."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"'{text}': {error}") from error


def find(call: Call, folder: str = "", of: Callable[[str], Any] = light) -> Any:
    """Return what a call names: a user's own, or what `of` returns; ValueError if there is none."""
    check_name(call)
    if ":" in call.target:
        return load(call.target, folder)
    if call.target in REFERENCES:
        return type(call.target, (of("FedAvg"),), {"method": call.target})
    return of(call.target)


def check_bound(takes: Signature, call: Call, kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument of a call that is missing, unknown or too many."""
    names = [n for n, p in takes.parameters.items() if p.kind is not p.VAR_KEYWORD]
    if not any(p.kind is p.VAR_KEYWORD for p in takes.parameters.values()):
        for name in kwargs.keys() - set(names):
            legal = f"it takes {', '.join(names)}" if names else "it takes none"
            raise TypeError(f"there is no argument '{name}'{nearest(name, names)} ({legal})")
    try:
        takes.bind(*call.args, **kwargs)
    except TypeError as error:
        row = METHODS.get(call.target)
        example = row.example if row else f"{call.target}({', '.join(n + '=...' for n in names)})"
        known = {*names, *Options.names()}
        odd = [f"; there is no argument '{n}'{nearest(n, known)}" for n in kwargs if n not in known]
        raise TypeError(f"{error}{''.join(odd)}; for example {example}") from None


def with_values(call: Call) -> Call:
    """Return a call with what its arguments' own calls make: aggregators, privacy, stopping conditions."""

    def made(value: Any) -> Any:
        if not isinstance(value, Call):
            return value
        if value.target not in VALUES:
            raise ValueError(
                f"an argument may be a call of {', '.join(VALUES)}; not of {value.target}"
            )
        kind = getattr(flwr_regs, value.target)
        with named(str(value)):
            check_bound(inspect.signature(kind), value, value.kwargs)
            return kind(*map(made, value.args), **{k: made(v) for k, v in value.kwargs.items()})

    return replace(
        call, args=tuple(map(made, call.args)), kwargs={k: made(v) for k, v in call.kwargs.items()}
    )


def with_argument(
    calls: Sequence[Call], target: str, name: str, value: Any, folder: str = ""
) -> tuple[Call, ...]:
    """Return a method with one argument of each call of `target` replaced or added."""

    def changed(call: Call) -> Call:
        if call.target != target:
            return call
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
