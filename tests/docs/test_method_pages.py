"""The pages of the methods: their examples run, and their ranges are what the constructors accept."""

from __future__ import annotations

import doctest
import re
from dataclasses import fields
from typing import Any

import pytest

import flwr_regs as fr
from flwr_regs.experiments.strategies import build, catalogue
from flwr_regs.experiments.calls import parse_methods
from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "methods"
PAGES = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
ROWS = list(fr.METHODS.values())


def of(row: fr.Method) -> str:
    return PAGES[f"{row.name.lower()}.md"]


@pytest.mark.parametrize("name", PAGES)
def test_the_examples_of_a_page_run(name: str) -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```", PAGES[name], re.M | re.S)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        test = doctest.DocTestParser().get_doctest(block, names, name, name, 0)
        report: list[str] = []
        doctest.DocTestRunner().run(test, out=report.append, clear_globs=False)
        assert not report, "".join(report)
        names = test.globs


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_and_compositions_of_a_page_are_methods(name: str) -> None:
    commands = re.findall(r'flwr-regs run [^`"]*methods="([^"]*)"', PAGES[name])
    assert commands
    for methods in commands + re.findall(r"`(\w+(?:\([^`]*\))?\+[^`]*)`", PAGES[name]):
        for calls in parse_methods(methods).values():
            build(calls)


# parameters


def table(text: str) -> list[tuple[str, str, str]]:
    """Return (name, default, range) of each row of a table of parameters."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [tuple(c.strip() for c in re.split(r"(?<!\\)\|", line)[1:4]) for line in lines]  # type: ignore[misc]


def section(text: str, title: str) -> str:
    _, _, after = text.partition(f"\n## {title}\n")
    return re.split(r"^## ", after, flags=re.M)[0]


TERMS = [n for n in catalogue() if n not in fr.METHODS]
TABLES = [(row.name, section(of(row), "Parameters")) for row in ROWS]
TABLES += [(name, section(PAGES["terms.md"], name)) for name in TERMS]


SAMPLES: dict[str, tuple[list[Any], list[Any]]] = {
    # range -> values inside, values outside
    "≥ 0": ([0, 3.0], [-0.1]),
    "> 0": ([3.0], [0, -0.1]),
    "≥ 1": ([1, 5], [0]),
    "[0, 1)": ([0, 0.5], [-0.1, 1.0]),
    "[0, 1]": ([0, 1.0], [-0.1, 1.1]),
    "(0, 1]": ([0.5, 1.0], [0, 1.1]),
}


def settings(name: str) -> dict[str, Any]:
    """Return values for the parameters of a strategy or term, from the examples of the registry."""
    if name in fr.METHODS:
        ((call,),) = parse_methods(fr.METHODS[name].example).values()
        return dict(call.kwargs)
    for row in ROWS:
        (calls,) = parse_methods(row.example).values()
        for term in build(calls).term.terms:
            if type(term).__name__ == name:
                return {f.name: getattr(term, f.name) for f in fields(term)}
    return {}


RANGES = [
    (name, parameter.strip("`"), values)
    for name, text in TABLES
    for parameter, _, values in table(text)
    if values in SAMPLES or values.count("`") >= 4
]


@pytest.mark.parametrize(("name", "parameter", "values"), RANGES)
def test_a_range_is_what_the_constructor_accepts(name: str, parameter: str, values: str) -> None:
    kind, given = getattr(fr, name), settings(name)
    if values in SAMPLES:
        good, bad = SAMPLES[values]
    else:
        good = [eval(v) for v in re.findall(r"`([^`]*)`", values)]
        bad = ["odd"] if good != [True, False] else []
    for value in good:
        kind(**{**given, parameter: value})
    for value in bad:
        with pytest.raises(ValueError, match=r".+"):
            kind(**{**given, parameter: value})
