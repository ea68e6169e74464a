"""The command, from a driver's file to the exit status; and pfl and FedJAX themselves, if they install."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.conformity import cli
from benchmarks.conformity.libraries import LIBRARIES
from tests.conftest import ROOT
from tests.docs.test_tutorials import blocks

EXAMPLE = blocks(ROOT / "docs/conformity.md", "python")[0]


def test_the_pages_example_agrees_and_a_wrong_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, as libraries are."""
    mine, out = tmp_path / "mine.py", tmp_path / "out.json"
    mine.write_text(EXAMPLE)
    assert cli.main(["--module", f"{mine}:drive", "--methods", "FedAvg", "--json", str(out)]) == 0
    assert "FedAvg: agrees with the paper" in capsys.readouterr().out
    assert json.loads(out.read_text())[0]["agrees"]
    assert EXAMPLE.count("len(y) / total") == 1
    mine.write_text(EXAMPLE.replace("len(y) / total", '1 / len(task["cohorts"][0])'))
    words = ["--module", f"{mine}:drive", "--methods", "FedAvg", "--python", sys.executable]
    assert cli.main([*words, "--json", str(out)]) == 1
    assert "equals uniform: it gives all clients the same weight" in capsys.readouterr().out
    assert json.loads(out.read_text())[0]["behaviours"] == [["uniform"]]


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_does_what_the_page_says(library: str, tmp_path: Path) -> None:
    """Its packages are installed, or are in the cache from before; without a network it is skipped."""
    out = tmp_path / "out.json"
    cli.main(["--library", library, "--json", str(out)])
    rows = json.loads(out.read_text())
    if all("skipped" in row for row in rows):
        pytest.skip(rows[0]["skipped"])
    kept = json.loads((ROOT / "docs/studies/conformity-libraries.json").read_text())
    keys = ("library", "method", "agrees", "round", "client", "step", "behaviours")
    want = [{k: row[k] for k in keys} for row in kept if row["library"] == library]
    assert [{k: row.get(k) for k in keys} for row in rows] == want
