"""What ends with the process that asked for it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="others have no /proc")
def test_a_keeper_ends_all_that_a_command_started_when_its_asker_is_killed(tmp_path: Path) -> None:
    """Also a process that left its parent and its session, as Ray's do."""
    pids, folder = tmp_path / "pids", tmp_path / "folder"
    folder.mkdir()
    orphan = f"sh -c 'setsid sleep 600 & echo $! >> {pids}' & sleep 600 & echo $! >> {pids}; wait"
    keeper = ["-m", "benchmarks.speed.keeper", str(folder), "sh", "-c", orphan]
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
