"""A comparison that is killed goes on within its runs: the same model, to the bit."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from flwr_regs.experiments.cli import main
from flwr_regs.experiments.report import run_records as records
from tests.processes import BIN, environment

METHOD = "EFL(1.0, density_up=0.1, density_down=0.1)"  # the clients keep residuals, the server too
WORDS = ["num-clients=3", "rounds=40", "checkpoint-every=0.001", "fraction-train=0.7"]
WORDS += [f"methods={METHOD}", "examples-per-client=20"]


def lines(folder: Path) -> int:
    """The lines of the run's record so far."""
    path = records.record_path(folder, METHOD, 7)
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_killed_run_goes_on_in_the_middle_to_the_bit(
    tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(["run", *WORDS, f"out={whole}"]) == 0
    assert not list((whole / "checkpoints").iterdir())
    process = subprocess.Popen(
        [BIN / "flwr-regs", "run", *WORDS, f"out={broken}", "--workers", str(workers)],
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while lines(broken) < 9:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    time.sleep(1.0)  # a worker ends with its parent
    if lines(broken) > 42:
        pytest.skip("the run was faster than its end")
    assert list((broken / "checkpoints").iterdir())
    assert main(["run", "--resume", str(broken)]) == 0
    model = f"{records.file_name(METHOD)}.safetensors"
    a, b = load_file(whole / model), load_file(broken / model)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
    ours, theirs = (records.read(records.record_path(f, METHOD, 7)) for f in (whole, broken))
    assert ours is not None
    assert theirs is not None
    assert ours.test == theirs.test
    assert [r["cohort"] for r in ours.rounds] == [r["cohort"] for r in theirs.rounds]
    assert theirs.processor_seconds is None  # not all of it ran in one process
    assert not list((broken / "checkpoints").iterdir())


def test_a_checkpoint_without_its_record_is_not_used(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["run", *WORDS, "rounds=3", f"out={out}"]) == 0
    before = load_file(out / f"{records.file_name(METHOD)}.safetensors")
    stale = out / "checkpoints" / f"{records.file_name(METHOD)}-seed7" / "round-000002"
    stale.mkdir(parents=True)
    path = records.record_path(out, METHOD, 7)
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:2]))
    assert main(["run", "--resume", str(out)]) == 0
    after = load_file(out / f"{records.file_name(METHOD)}.safetensors")
    assert all(np.array_equal(before[n], after[n]) for n in before)
