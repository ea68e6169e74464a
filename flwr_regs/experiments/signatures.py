"""What a part of a method takes, and a check of its arguments.

The package's own are read from their source: to import a method takes a second, since that loads torch and
Flower. A strategy takes what its ``__init__`` does, a term its fields.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import flwr_regs
from flwr_regs import term
from flwr_regs.experiments.calls import REFERENCES, Call, check_name
from flwr_regs.experiments.user_code import load
from flwr_regs.methods.registry import METHODS
from flwr_regs.server.arguments import check_arguments
from flwr_regs.server.options import Options
from flwr_regs.server.refusals import check_ranges
from flwr_regs.wire.config import nearest

FOLDER = Path(__file__).parents[1] / "methods"
VALUES = (
    *("CenteredClipping", "CoordinateMedian", "GeometricMedian", "Krum", "Mean", "NormBound"),
    *("TrimmedMean", "CentralDP", "Patience", "Target"),
)
"""The calls that an argument of a method may be."""
OPEN = "FedOpt"
"""The strategy that also takes its torch optimiser's arguments."""


@contextmanager
def named(text: str) -> Iterator[None]:
    """Put the text of a part or method in front of the error that it raises, which becomes a ValueError."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"'{text}': {error}") from error


def find(call: Call, folder: str = "") -> Any:
    """Return the class, term, list or function that a call names; ValueError if there is none."""
    check_name(call)
    if call.target in REFERENCES:
        return type(call.target, (flwr_regs.FedAvg,), {"method": call.target})
    return load(call.target, folder) if ":" in call.target else getattr(flwr_regs, call.target)


def check(call: Call, folder: str = "") -> None:
    """Raise ValueError for a call of the package that its source shows to be wrong.

    That is an unknown name; an argument that is missing, unknown, too many or out of its range. Of a user's
    own code, only whether it is there is looked at.
    """
    check_name(call)
    with named(str(call)):
        if ":" in call.target:
            find(call, folder)
            return
        call = with_values(call)
        takes = signature(call.target)
        is_strategy = call.target in METHODS
        if is_strategy and call.target != OPEN:
            own = {*takes.parameters}
            check_arguments(call.target, call.kwargs.keys() - own, Options.names(), own)
        kwargs = call.kwargs
        if not is_strategy:
            kwargs = {k: v for k, v in kwargs.items() if k not in Options.names()}
        given = bound(takes, call, kwargs).arguments
        check_ranges({k: v for k, v in call.kwargs.items() if v is not None})
        for of_term in METHODS[call.target].terms if is_strategy else (call.target,):
            fields = signature(of_term).parameters
            for name, legal in _ranges(of_term).items():
                if name in given and not given[name] is takes.parameters[name].default is None:
                    optional = fields[name].default is None
                    legal.check(call.target, name, given[name], optional)


def bound(takes: Signature, call: Call, kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """Return a call's arguments by name; TypeError for one that is missing, unknown or too many."""
    names = [n for n, p in takes.parameters.items() if p.kind is not p.VAR_KEYWORD]
    if not any(p.kind is p.VAR_KEYWORD for p in takes.parameters.values()):
        for name in kwargs.keys() - set(names):
            legal = f"it takes {', '.join(names)}" if names else "it takes none"
            raise TypeError(f"there is no argument '{name}'{nearest(name, names)} ({legal})")
    try:
        return takes.bind(*call.args, **kwargs)
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
            bound(inspect.signature(kind), value, value.kwargs)
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
    """Return what the class or function of a call takes."""
    if ":" in call.target:
        thing = find(call, folder)  # a term, or a list of terms, takes nothing
        return inspect.signature(thing) if callable(thing) else Signature()
    return signature(call.target)


def signature(name: str) -> Signature:
    """Return what one of the package's strategies or terms takes."""
    parameters: dict[str, Parameter] = {}
    for node in _line(name):
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                parameters = dict(_of_init(part.args))
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                name, kind = part.target.id, ast.unparse(part.annotation)
                if "ClassVar" not in kind:
                    parameters[name] = _parameter(name, part.value, kind)
    return Signature([*parameters.values()])


def document(name: str) -> str:
    """Return the docstring of one of the package's strategies or terms."""
    return ast.get_docstring(_line(name)[-1]) or ""


def _of_init(args: ast.arguments) -> Iterator[tuple[str, Parameter]]:
    plain = args.args[1:]  # without self
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults + args.kw_defaults
    for arg, default in zip([*plain, *args.kwonlyargs], defaults, strict=True):
        parameter = _parameter(arg.arg, default)
        kind = Parameter.KEYWORD_ONLY if arg in args.kwonlyargs else parameter.kind
        yield arg.arg, parameter.replace(kind=kind)
    if args.kwarg:
        yield args.kwarg.arg, Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD)


def _parameter(name: str, default: ast.expr | None, kind: str = "") -> Parameter:
    return Parameter(
        name,
        Parameter.POSITIONAL_OR_KEYWORD,
        default=Parameter.empty if default is None else ast.literal_eval(default),
        annotation=kind or Parameter.empty,
    )


def _ranges(name: str) -> dict[str, term.Range]:
    """Return parameter -> its range, of a term; those that are not among term.py's are left out."""
    ranges = {}
    for node in _line(name):
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == "ranges":
                assert isinstance(part.value, ast.Dict)
                for key, value in zip(part.value.keys, part.value.values, strict=True):
                    legal = getattr(term, ast.unparse(value), None)
                    if isinstance(legal, term.Range) and isinstance(key, ast.Constant):
                        ranges[str(key.value)] = legal
    return ranges


def _line(name: str) -> list[ast.ClassDef]:
    """Return the source of a class and of those that it derives from, the most general one first."""
    line, bases = [], [name]
    while bases:
        if made := _classes().get(bases.pop()):
            line.append(made)
            bases += [base.id for base in made.bases if isinstance(base, ast.Name)]
    return line[::-1]


@lru_cache
def _classes() -> Mapping[str, ast.ClassDef]:
    """Return name -> source of the classes of methods/, where each name is one class's."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.rglob("*.py"))
    return {
        node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)
    }
