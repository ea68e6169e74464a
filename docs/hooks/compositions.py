"""What each method does not compose with, and the reason that the package gives.

``python docs/hooks/compositions.py`` tries all, and writes flwr_regs/methods/compositions.toml, from which
``flwr-regs methods NAME`` and the methods' pages have it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from flwr_regs import CentralDP  # noqa: E402
from flwr_regs.experiments.calls import parse_methods  # noqa: E402
from flwr_regs.experiments.strategies import build  # noqa: E402
from flwr_regs.methods.registry import COMPOSITIONS, METHODS, Method  # noqa: E402

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "privacy=CentralDP(...)": {
        "weighting": "uniform",
        "incomplete": "average",
        "privacy": CentralDP(1.0, 1.0),
    },
    'wire_dtype="bfloat16"': {"wire_dtype": "bfloat16"},
    "overlap=True": {"downlink": "delta", "overlap": True},
}
"""Settings that some methods refuse -> what a strategy gets."""


def others(row: Method) -> dict[str, str]:
    """Return name -> call of all that a method can be composed with: the other methods, and terms."""
    calls = {r.name: r.example for r in METHODS.values() if r.name != row.name}
    for r in METHODS.values():
        if len(r.terms) > 1:  # else its term is what its method adds
            (parts,) = parse_methods(r.example).values()
            calls |= {type(t).__name__: repr(t) for t in build(parts).term.terms}
    taken = {r.terms for r in METHODS.values() if len(r.terms) == 1}
    single = {names[0] for names in taken} | set(row.terms)
    return {name: call for name, call in calls.items() if name not in single}


def refusals(row: Method) -> Iterator[tuple[str, str]]:
    """Yield (something that a method refuses, why)."""
    for name, call in others(row).items():
        if why := refusal(f"{row.example}+{call}", {}):
            yield name, why
    for name, given in SETTINGS.items():
        if why := refusal(row.example, given):
            yield name, why.removeprefix(f"{name}: ")


def refusal(methods: str, settings: Mapping[str, Any]) -> str:
    """Return why a composition is refused, without its own text in front; "" if it is built."""
    ((label, parts),) = parse_methods(methods).items()
    try:
        build(parts, **settings)
    except (ValueError, TypeError) as error:
        return str(error).removeprefix(f"'{label}': ")
    return ""


def terms_of(*rows: Method) -> Iterator[str]:
    """Yield the names of methods' terms."""
    for row in rows:
        (parts,) = parse_methods(row.example).values()
        yield from (term.name for term in build(parts).term.terms)


def grouped(row: Method) -> dict[str, list[str]]:
    """Return why a method refuses something -> all that it refuses for this reason."""
    foreign = {*terms_of(*METHODS.values())} - {*terms_of(row)}
    groups: dict[str, dict[str, str]] = {}
    for name, why in refusals(row):
        common = re.sub("'([a-z-]+)'", lambda of: "the other" if of[1] in foreign else of[0], why)
        groups.setdefault(common, {})[name] = why
    # A reason that stands alone keeps the other's name.
    return {
        common if len(group) > 1 else next(iter(group.values())): [*group]
        for common, group in groups.items()
    }


def text() -> str:
    """Return the file: method -> why it refuses -> what it refuses."""
    return tomli_w.dumps({row.name: grouped(row) for row in METHODS.values()})


if __name__ == "__main__":
    COMPOSITIONS.write_text(text(), encoding="utf-8")
