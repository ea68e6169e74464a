"""``python -m benchmarks.speed measure|report|gpu``: see the package."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import filled
from benchmarks.speed import report
from benchmarks.speed.timing import QUICK, Effort, Row, machine, say

PARTS = {
    "step": ("step", Effort(seconds=10.0, least=5)),
    "clients": ("clients", Effort(seconds=60.0, least=5)),
    "aggregation": ("aggregation", Effort(seconds=15.0, least=3)),
    "codec": ("codec", Effort(seconds=5.0, least=5)),
    "growth": ("growth", Effort()),
    "ray": ("simulation", Effort()),
    "peers": ("peers", Effort()),
    "profile": ("profiles", Effort()),
    "gpu": ("gpu", Effort(seconds=20.0, least=5)),
}
"""Name -> the file that measures it, and how long its sides take turns."""


def measure(names: Sequence[str], out: Path = report.OUT, quick: bool = False) -> list[str]:
    """Measure, and keep each part in the file when it is done; return the names of those that failed."""
    torch.set_num_threads(1)
    failed = []
    for i, name in enumerate(names, 1):
        say(f"{i} of {len(names)}: {name}")
        file, effort = PARTS[name]
        take: Callable[[Effort], list[Row]] = import_module(f"benchmarks.speed.{file}").measure
        began = time.monotonic()
        try:
            rows = take(QUICK if quick else effort)
        except Exception:  # the others are worth having
            traceback.print_exc()
            failed.append(name)
            continue
        took = round(time.monotonic() - began, 1)
        keep(out, name, {"machine": machine(), "seconds": took, "rows": rows})
        say(f"  {name}: {took:.0f} s")
    return failed


def keep(out: Path, name: str, found: dict[str, Any]) -> None:
    """Put one part's results into the file."""
    parts = {**report.kept(out), name: found}
    report.keep(out, {n: parts[n] for n in PARTS if n in parts})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    taking = verbs.add_parser("measure", help="measure, keep the results, and write the pages")
    taking.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(list(PARTS)[:-1])}; default: all"
    )
    taking.add_argument("--json", type=Path, help=f"the results' file (default: {report.OUT.name})")
    taking.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    shown = verbs.add_parser("report", help="write the pages again from the kept results")
    shown.add_argument("--json", type=Path, default=report.OUT, help="the results' file")
    shown.add_argument("--print", action="store_true", help="print the tables, and write nothing")
    gpu = verbs.add_parser("gpu", help="measure clients on a CUDA GPU, and print the table")
    gpu.add_argument("--json", type=Path, default=Path("speed-gpu.json"), help="the results' file")
    gpu.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    given = parser.parse_args(argv)
    if given.verb == "gpu":
        failed = measure(["gpu"], given.json, given.quick)
        print(report.tables(report.kept(given.json))["gpu"])
        return 1 if failed else 0
    if given.verb == "report":
        found = report.kept(given.json)
        if given.print:
            print("\n\n".join(report.tables(found).values()))
        else:
            publish(found)
        return 0
    known = [name for name in PARTS if name != "gpu"]
    if unknown := {*given.parts} - {*known}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    out = given.json or (Path("speed-quick.json") if given.quick else report.OUT)
    parts = given.parts or known
    failed = measure(parts, out, given.quick)
    tables = report.tables(found := report.kept(out))
    print("\n\n".join(tables[n] for n in ("targets", *parts, "machine") if n in tables))
    if out == report.OUT:
        publish(found)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def publish(found: Mapping[str, Any]) -> None:
    """Write the pages' tables, and draw the picture."""
    tables = report.tables(found)
    del tables["gpu"]  # a page shows what this machine has
    summary = {"summary": tables.pop("summary")}
    for page, parts in ((report.PAGE, summary), (report.DETAILS, tables)):
        page.write_text(filled(page.read_text(), "speed", parts))
    report.draw(found, report.PICTURE)


if __name__ == "__main__":
    sys.exit(main())
