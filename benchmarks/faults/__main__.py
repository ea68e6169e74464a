"""What faults cost: each is played on a real federation of three SuperNodes with TLS and keys.

``python -m benchmarks.faults measure [CASE ...]`` plays the cases, one federation for each (15 minutes for
all on a quiet machine). After each case it writes what the user sees, the seconds and what is lost into
``docs/studies/faults.json``. A case that fails is named at the end, and does not stop the others.
``python -m benchmarks.faults report`` puts the file's figures into the table of ``docs/deployment.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.accidents import CASES
from benchmarks.faults.federation import Federation
from tests.conftest import ROOT

OUT = ROOT / "docs/studies/faults.json"
PAGE = ROOT / "docs/deployment.md"
ROW = re.compile(r"^(\| .* <!-- fault: (\w+) -->).*$", re.MULTILINE)
"""A row of the page's table: what happens, with the case's mark, and three cells that are filled in."""


def measure(names: Sequence[str], out: Path = OUT) -> list[str]:
    """Play cases and write their outcomes into a file; return the names of those that failed."""
    failed = []
    for i, name in enumerate(names, 1):
        began = time.monotonic()
        print(f"{i} of {len(names)}: {name} …", flush=True)
        try:
            with tempfile.TemporaryDirectory(
                prefix="faults-", ignore_cleanup_errors=True
            ) as folder:
                outcome = play(name, Path(folder))
        except Exception:  # the others are worth having
            traceback.print_exc()
            failed.append(name)
            continue
        known = json.loads(out.read_text()) if out.exists() else {}
        text = json.dumps(
            {n: {**known, name: outcome}[n] for n in CASES if n in {*known, name}},
            indent=2,
            ensure_ascii=False,
        )
        out.write_text(text + "\n")
        took = time.monotonic() - began
        print(f"  {outcome['seconds']} s, lost: {outcome['lost']}, in {took:.0f} s", flush=True)
    return failed


def play(name: str, folder: Path) -> dict[str, Any]:
    """Play a case on a federation of its own; return what the page says of it."""
    with Federation(folder / "federation") as federation:
        outcome = CASES[name](federation, folder / "play")
    sees = outcome.sees.replace(str(folder), "…")
    return {"sees": sees, "seconds": round(outcome.seconds, 1), "lost": outcome.lost}


def filled(page: str, outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with the outcomes in the rows of its table."""

    def row(match: re.Match[str]) -> str:
        if match[2] not in outcomes:
            return f"{match[1]} | | | |"
        case = outcomes[match[2]]
        seconds = f"{case['seconds']:.0f}" if case["seconds"] else "0"
        sees = case["sees"].replace("|", "\\|")
        return f"{match[1]} | {sees} | {seconds} | {case['lost']} |"

    return ROW.sub(row, page)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("measure", help="play the cases and write the file")
    measured.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all"
    )
    commands.add_parser("report", help="put the file's figures into the page")
    given = parser.parse_args()
    if given.command == "report":
        PAGE.write_text(filled(PAGE.read_text(), json.loads(OUT.read_text())))
        return 0
    if unknown := {*given.cases} - {*CASES}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    failed = measure(given.cases or list(CASES))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
