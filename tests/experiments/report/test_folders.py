"""Results' folders."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from flwr_regs.experiments.cli import main
from flwr_regs.experiments.report.folders import locked, new_folder

SMALL = ["rounds=1", "num-clients=2", "methods=FedAvg"]


def test_runs_of_one_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    made = [new_folder(tmp_path / "results").name for _ in range(3)]
    assert made == ["now", "now.2", "now.3"]


def test_a_folder_that_cannot_be_written_gets_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for out in ("/proc/here", "/sys"):
        assert main(["run", *SMALL, f"out={out}"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"flwr-regs: results cannot be written into {out} (")
        assert said.count("\n") == 1
    (tmp_path / "results").write_text("a file")
    monkeypatch.chdir(tmp_path)
    assert main(["run", *SMALL]) == 2
    assert "results cannot be written into" in capsys.readouterr().err


def test_a_second_run_in_one_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["run", *SMALL, f"out={out}"]) == 0
    with locked(out):
        assert main(["run", "--resume", str(out)]) == 2
    said = capsys.readouterr().err
    assert f"{out} is being written by another run (process {os.getpid()})" in said
    assert main(["run", "--resume", str(out)]) == 0
