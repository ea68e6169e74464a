"""Methods as Python calls: ``"FedAvg, FedFOR(alpha=0.5), FedBN+FedFOR, mine.py:Decay(wd=0.01)"``.

Commas and semicolons separate methods, ``+`` joins the parts of one, none of them inside brackets or
quotes. A part is a name, a reference to the user's own code (``mine.py:name``, ``module:name``), or a call
of either, with literals as arguments. Nothing is imported or evaluated here; strategies.py does that.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flwr_regs.methods.registry import METHODS, TERMS
from flwr_regs.wire.config import nearest

_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
# a path, perhaps of Windows; commas and + have separated before
_FILE = r"([A-Za-z]:[\\/])?[^'\"()\[\]{}:\n]*[^'\"()\[\]{}:\n/]\.py"
NAME = re.compile(rf"{_FILE}:{_DOTTED}|{_DOTTED}(:{_DOTTED})?")
CLOSING = {"(": ")", "[": "]", "{": "}"}
_QUOTED_OR_ONE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|.""", re.DOTALL)
LITERAL = "a number, quoted text, True, False, None, a list, tuple or dict, or a call: Target(0.9)"


@dataclass(frozen=True)
class Call:
    """One part of a method; ``str(call)`` is its text in one form of spaces and quotes.

    Attributes
    ----------
    target : str
        ``FedFOR``, or a reference: ``mine.py:name``, ``package.module:name``, ``here:name``.
    args, kwargs : tuple, dict
        Its arguments: literals, or calls such as ``aggregator=Krum(byzantine=1)``.
    called : bool
        Whether it has parentheses.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    called: bool

    def __str__(self) -> str:
        given = [_text(a) for a in self.args]
        given += [f"{k}={_text(v)}" for k, v in self.kwargs.items()]
        if given or (self.called and ":" in self.target):
            return f"{self.target}({', '.join(given)})"
        return self.target


Calls = tuple[Call, ...]
"""A method: its parts."""


def parse_methods(text: str) -> dict[str, Calls]:
    """Return label -> parts, in order. The label is the method's text in one form.

    Raises
    ------
    ValueError
        The sentence names the part, and says what was expected and where. Also if a method appears twice.
    """
    methods = {}
    for start, one in pieces(text, ",;"):
        if one.strip():
            parts = tuple(_part(part, start + at, text) for at, part in pieces(one, "+"))
            if (label := text_of(parts)) in methods:
                raise ValueError(f"'{label}' appears twice in {text!r}: name each method once")
            methods[label] = parts
    if not methods:
        raise ValueError(f"there is no method in {text!r}; for example: FedAvg, FedFOR(alpha=0.5)")
    return methods


def text_of(calls: Iterable[Call]) -> str:
    """Return a method's text in one form: its label."""
    return "+".join(map(str, calls))


REFERENCES = ("Local", "Pooled")
"""Rows that are no methods: see run/references.py."""
OUTSIDE = {
    "FedBuff": "FedBuff has no rounds to compare: use it in a program (docs/asynchronous.md)"
}
"""The package's strategies that no comparison takes -> why."""


def catalogue() -> list[str]:
    """Return the names that need no module: the registry's strategies and terms."""
    terms = [name for row in METHODS.values() for name in row.terms]
    return list(dict.fromkeys([*METHODS, *terms, *TERMS]))


def check_name(call: Call, rows: Iterable[str] = ()) -> None:
    """Raise ValueError if a call is neither of the package nor of a user's own code.

    The error names the nearest one, or the nearest of a card's `rows`.
    """
    if call.target in OUTSIDE:
        raise ValueError(OUTSIDE[call.target])
    if ":" not in call.target and call.target not in (names := [*catalogue(), *REFERENCES]):
        hint = f"{nearest(call.target, [*rows, *names])} (`flwr-regs list methods` shows all"
        what = f"the package has no strategy or term '{call.target}'"
        raise ValueError(f"{what}{hint}; your own is mine.py:name)")


def _part(text: str, start: int, whole: str) -> Call:
    part = text.strip()
    at = start + len(text) - len(text.lstrip()) + 1
    where = f"'{part}'" + (f", at character {at} of {whole!r}" if part != whole.strip() else "")
    name = NAME.match(part)
    rest = part[name.end() :].lstrip() if name else part
    if not part:  # a paper may call the method FedADC+
        named = re.split("[+,; ]", whole[: start - 1])[-1] + "Plus"
        hint = nearest(named, [name for name in catalogue() if name.lower() == named.lower()])
        what = f"'+' joins two terms, and one is missing at character {at} of {whole!r}"
        raise ValueError(f"{what}{hint}")
    if name is None or (rest and not rest.startswith("(")):
        raise ValueError(f"{where}: expected a method such as FedFOR(alpha=0.5) or mine.py:T(x=1)")
    if not rest:
        return Call(name[0], (), {}, called=False)
    try:
        call = ast.parse(f"f{rest}", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        why = getattr(error, "msg", error)
        raise ValueError(f"{where}: the arguments are not Python ({why})") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{where}: expected one pair of parentheses after '{name[0]}'")
    return _call(name[0], call, where)


def _call(target: str, node: ast.Call, where: str) -> Call:
    """Return the call of a syntax tree; ValueError unless its arguments are literals or such calls."""
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in kwargs:
            wrong = f"'{keyword.arg}' twice" if keyword.arg else "'**'"
            raise ValueError(f"{where}: expected each argument by its name once, not {wrong}")
        kwargs[keyword.arg] = _value(keyword.value, f"{where}: the argument '{keyword.arg}'")
    args = [_value(a, f"{where}: argument {i}") for i, a in enumerate(node.args, start=1)]
    return Call(target, tuple(args), kwargs, called=True)


def _value(node: ast.expr, what: str) -> Any:
    """Return an argument: a literal, or a call of one of the package's names."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _call(node.func.id, node, what)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        text = ast.unparse(node)
        plain = re.fullmatch(r"[\w.-]+", text.replace(" ", "")) and not isinstance(node, ast.Call)
        hint = f"; text needs quotes: {text.replace(' ', '')!r}" if plain else ""
        raise ValueError(f"{what} must be {LITERAL}; not {text}{hint}") from error


def _text(value: Any) -> str:
    """Return an argument as it is written."""
    if isinstance(value, Call):  # always with parentheses, unlike a method
        return str(value) if value.args or value.kwargs else f"{value.target}()"
    return repr(value)


def literal(text: str) -> Any:
    """Return the value of a literal or a call; raise ValueError for any other text."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, "a value")
    except SyntaxError as error:
        raise ValueError(f"a value must be {LITERAL}; not {text}") from error


def pieces(text: str, separators: str) -> Iterator[tuple[int, str]]:
    """Yield (position, piece) of `text` between `separators` that stand outside brackets and quotes.

    Raises
    ------
    ValueError
        A bracket or a quote is not closed, or a bracket closes none; the message says where.
    """
    begin = 0
    opened: list[int] = []  # the positions of brackets that are open
    for match in _QUOTED_OR_ONE.finditer(text):
        c, i = match[0], match.start()
        if c in ("'", '"'):  # no other one closes it
            raise ValueError(f"the quote {c} at character {i + 1} of {text!r} is not closed")
        if c in CLOSING:
            opened.append(i)
        elif c in CLOSING.values():
            if not opened or CLOSING[text[opened[-1]]] != c:
                expected = f"'{CLOSING[text[opened[-1]]]}'" if opened else "no closing bracket"
                raise ValueError(f"'{c}' at character {i + 1} of {text!r}: expected {expected}")
            opened.pop()
        elif c in separators and not opened:
            yield begin, text[begin:i]
            begin = i + 1
    if opened:
        at = opened[-1]
        raise ValueError(f"the bracket {text[at]} at character {at + 1} of {text!r} is not closed")
    yield begin, text[begin:]


def values(text: str) -> list[str]:
    """Return the values of ``--values``, separated as methods are."""
    several = [v.strip() for _, v in pieces(text, ",;") if v.strip()]
    if not several:
        raise ValueError(f"--values holds no value: {text!r}; for example --values 0.1,0.5")
    return several


def words(text: str) -> list[str]:
    """Return the words of a shell line; quotes and spaces inside brackets stay as they are."""
    pieces_of_line = [w for _, w in pieces(text, " \t\n") if w]
    # a quote outside brackets encloses the value, as in a shell
    return [w if _BRACKETED.fullmatch(w) else "".join(shlex.split(w)) for w in pieces_of_line]


_BRACKETED = re.compile(r"[^'\"(\[{]*[(\[{].*", re.DOTALL)
