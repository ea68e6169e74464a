"""Results' folders, and what ends with the process that asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flwr_regs.experiments.cli import main
from flwr_regs.experiments.report.folders import locked, new_folder
from tests.conftest import ROOT

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


@pytest.mark.skipif(sys.platform != "linux", reason="others have no /proc")
def test_a_keeper_ends_all_that_a_command_started_when_its_asker_is_killed(tmp_path: Path) -> None:
    """Also a process that left its parent and its session, as Ray's do."""
    pids, folder = tmp_path / "pids", tmp_path / "folder"
    folder.mkdir()
    orphan = f"sh -c 'setsid sleep 600 & echo $! >> {pids}' & sleep 600 & echo $! >> {pids}; wait"
    keeper = ["-m", "flwr_regs.experiments.run.keeper", str(folder), "sh", "-c", orphan]
    asks = (
        "import subprocess, sys, time\n"
        "subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(600)"
    )
    asker = subprocess.Popen([sys.executable, "-c", asks, sys.executable, *keeper], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (pids.is_file() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    asker.send_signal(signal.SIGKILL)
    asker.wait()
    started = [Path("/proc") / pid for pid in pids.read_text().split()]
    while any(p.exists() for p in started) or folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
