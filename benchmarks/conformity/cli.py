"""``python -m benchmarks.conformity``: drive other implementations; print where they leave the paper."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .behaviours import BEHAVIOURS, METHODS
from .compare import TOLERANCE, judge
from .environments import CannotRun, default_folder, drive, fetch, prepare
from .libraries import LIBRARIES
from .task import small_task

EPILOG = """
--library makes an environment of the library's own, with pinned packages, and keeps it in --folder. Where a
library is no package, git fetches its repository into the same folder, at a pinned commit; --list has them.
--module tests your own implementation: callable(task) gets a dict and returns one, for example:

  task["method"], task["parameters"], task["clients"][k]["x"], task["cohorts"], task["lr"], ...
  {"models": [<parameters after each round>], "points": {(round, client): [<parameters before each step>]}}

"points" may be left out; then only rounds are compared, not steps. docs/conformity.md has an example.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if all runs agree, 1 if one does not, 2 if none was compared."""
    options = _parser().parse_args(arguments)
    if options.list:
        print(listing())
        return 0
    found: list[dict[str, Any]] = []
    for name in options.library.split(",") if options.library else []:
        found += _library(name, options)
    if options.module:
        python = options.python or sys.executable
        methods = options.methods or METHODS[:4]
        found += _methods(options.module, python, options.module, methods, options, {}, False)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if all("skipped" in row for row in found):
        return 2
    return int(any(not row.get("agrees", True) for row in found))


def listing() -> str:
    """Return the libraries, and the behaviours that a run is compared with."""
    lines = ["libraries:"]
    for library in LIBRARIES.values():
        lines.append(f"  {library.name}: {', '.join(library.methods)} ({library.note})")
        lines.append(f"    {' '.join(library.packages)}")
        if source := library.source:
            what = f"{source.repository} at {source.commit}, licence: {source.licence}"
            lines.append(f"    fetched when you name it: {what}")
    lines.append(f"methods: {', '.join(METHODS)}")
    lines.append("behaviours:")
    for name, behaviour in BEHAVIOURS.items():
        methods = "all" if behaviour.methods == METHODS else ", ".join(behaviour.methods)
        lines.append(f"  {name}: it {behaviour.says} ({methods})")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.conformity",
        description="Drive other implementations of federated methods; say where they leave the paper.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--library", help=f"by commas, of: {', '.join(LIBRARIES)}")
    what.add_argument("--module", metavar="PATH.py:CALLABLE", help="your own implementation")
    what.add_argument("--list", action="store_true", help="print libraries and behaviours")
    first = ", ".join(METHODS[:4])
    words = f"by commas; default: all that a library has, of a module {first}; see --list"
    made.add_argument("--methods", type=_names, help=words)
    made.add_argument("--python", help="the Python that runs --module; default: this one")
    made.add_argument("--folder", type=Path, default=default_folder(), help="of environments")
    made.add_argument("--tolerance", type=float, default=TOLERANCE, help="of a parameter")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return made


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in METHODS]:
        raise argparse.ArgumentTypeError(f"unknown methods {unknown}; there are {list(METHODS)}")
    return names


def _library(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    if name not in LIBRARIES:
        sys.exit(f"--library {name}: unknown; there are {list(LIBRARIES)}")
    library = LIBRARIES[name]
    print(f"{name} ({' '.join(library.packages)})", flush=True)
    methods = [m for m in options.methods or METHODS if m in library.methods]
    variables = dict(library.environment)
    try:
        python = prepare(name, library.packages, options.folder)
        if source := library.source:
            print(f"  {source.repository} at {source.commit}, licence: {source.licence}")
            home = fetch(source.repository, source.commit, options.folder)
            variables["CONFORMITY_SOURCE"] = str(home)
    except CannotRun as error:
        print(f"  skipped: {error}")
        return [{"library": name, "method": m, "skipped": str(error)} for m in methods]
    return _methods(name, python, library.driver, methods, options, variables, True)


def _methods(
    name: str,
    python: str,
    driver: str,
    methods: Sequence[str],
    options: argparse.Namespace,
    variables: dict[str, str],
    isolated: bool,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    task = small_task()
    for method in methods:
        row: dict[str, Any] = {"library": name, "method": method}
        try:
            result = drive(python, driver, task, method, variables, isolated)
            verdict = judge(task, method, result, options.tolerance)
        except (CannotRun, ValueError) as error:
            row["skipped"] = text = str(error)
            text = f"skipped: {text}"
        else:
            text = verdict.text
            row |= {
                "agrees": verdict.agrees,
                "largest": verdict.largest,
                "round": verdict.round,
                "client": verdict.client,
                "step": verdict.step,
                "behaviours": [list(names) for names in verdict.behaviours],
                "text": text,
            }
        print(f"  {method}: {text}", flush=True)
        rows.append(row)
    return rows
