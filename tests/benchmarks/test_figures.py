"""Figures of the documents come out again: `.ci/full` runs the commands that made them.

The comparisons have a check of their own: ``python -m benchmarks.comparisons check``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import common
from tests.conftest import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
POINTS = 3.0
"""Accuracies differ by so much between kinds of processors, in per cent."""


def printed(*words: str, folder: Path = ROOT) -> str:
    run = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def cells(text: str) -> list[list[str]]:
    """The cells of a Markdown table's body."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def after(page: str, command: str) -> str:
    """The first table of a page after a command."""
    text = (ROOT / "docs" / page).read_text().split(f"python {command}")[1]
    return text[text.index("\n| ") :].split("\n\n")[0]


def test_rfedavgs_bytes() -> None:
    """To the byte, at 20 clients; 500 take minutes."""
    shown = [
        row for row in cells(after("rfedavg.md", "benchmarks/rfedavg_bytes.py")) if row[1] == "20"
    ]
    assert len(shown) == 2
    assert cells(printed("benchmarks/rfedavg_bytes.py", "--clients", "20")) == shown


def test_the_codes_bits() -> None:
    """All columns but the two of times."""
    shown = cells(after("efl.md", "benchmarks/codec.py"))
    measured = cells(printed("benchmarks/codec.py", "--repeats", "1"))
    assert [row[:4] + row[6:] for row in measured] == [row[:4] + row[6:] for row in shown]


def test_readmes_first_table(tmp_path: Path) -> None:
    words = "import sys; from flwr_regs.experiments.cli import main; sys.exit(main(['run']))"
    table = printed(
        "-c",
        f"sys_path = {str(ROOT)!r}; import sys; sys.path.insert(0, sys_path); {words}",
        folder=tmp_path,
    )
    for method in ("FedAvg", "FedFOR"):
        shown, trained = (
            re.findall(rf"^ {method} +(\d.*)$", text, re.M)[0].split()
            for text in ((ROOT / "README.md").read_text(), table)
        )
        assert trained[5] == shown[5]  # megabytes
        for a, b in zip(shown[:3], trained[:3], strict=True):
            assert abs(float(a) - float(b)) < POINTS, (method, shown, trained)


@pytest.mark.parametrize("study", ["fedfor-alpha", "implicit-step"])
def test_a_study_of_steps_and_strengths(study: str) -> None:
    """Two runs, the cheapest ones of different methods or arguments; MNIST may be in ``$DATA_DIR``."""
    data_dir = os.environ.get("DATA_DIR", "")
    there = ("digits", "mnist") if data_dir else ("digits",)
    lines = common.read_lines(ROOT / f"docs/studies/{study}.jsonl.gz")
    cheapest: dict[str, dict[str, object]] = {}
    for line in sorted(lines, key=lambda x: x["seconds"]):
        if line["setting"]["data"] in there and not line["diverged"]:
            cheapest.setdefault(f"{line['method']} {line['arguments']}", line)
    if not cheapest:
        pytest.skip("all of its runs need MNIST: set DATA_DIR to the folder that has MNIST/raw")
    for line in list(cheapest.values())[:2]:
        given = {k: line[k] for k in ("method", "arguments", "seed", "lr", "tuning")}
        run = common.Run(common.Setting(**line["setting"]), **given)  # type: ignore[arg-type]
        accuracy = common.train(run, data_dir)["accuracy"]
        assert abs(accuracy - line["accuracy"]) * 100 < POINTS, run.key
