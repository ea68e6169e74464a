"""What made the documents' figures still runs, and two studies come out again.

The comparisons have a check of their own: ``python -m benchmarks.comparisons check``.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from benchmarks import common
from tests.conftest import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
COMMANDS = (("rfedavg_bytes.py", "--clients", "20"), ("codec.py", "--repeats", "1"))


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_benchmark_runs_at_its_smallest(words: Sequence[str]) -> None:
    script, *options = words
    command = [sys.executable, f"benchmarks/{script}", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("\n| ") > 1


@pytest.mark.parametrize("study", ["fedfor-alpha", "implicit-step"])
def test_a_study_of_steps_and_strengths(study: str) -> None:
    """Two runs, the cheapest ones of different methods or arguments; MNIST may be in ``$DATA_DIR``.

    None of the tuning: at its largest rates, another rounding moves the accuracy by 10 points.
    """
    data_dir = os.environ.get("DATA_DIR", "")
    there = ("digits", "mnist") if data_dir else ("digits",)
    lines = common.read_lines(ROOT / f"docs/studies/{study}.jsonl.gz")
    cheapest: dict[str, dict[str, object]] = {}
    for line in sorted(lines, key=lambda x: x["seconds"]):
        if line["setting"]["data"] in there and not (line["diverged"] or line["tuning"]):
            cheapest.setdefault(f"{line['method']} {line['arguments']}", line)
    if not cheapest:
        pytest.skip("all of its runs need MNIST: set DATA_DIR to the folder that has MNIST/raw")
    for line in list(cheapest.values())[:2]:
        given = {k: line[k] for k in ("method", "arguments", "seed", "lr", "tuning")}
        run = common.Run(common.Setting(**line["setting"]), **given)  # type: ignore[arg-type]
        accuracy = common.train(run, data_dir)["accuracy"]
        # in points: processors differ
        assert abs(accuracy - line["accuracy"]) * 100 < 3, run.key
