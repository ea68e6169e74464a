"""What tests on Flower's own runtimes need: a private environment, and a SuperLink with SuperNodes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from flwr_regs.experiments.report.run_records import record_path
from flwr_regs.experiments.run.engine import execute
from flwr_regs.experiments.run.progress import Progress
from tests.conftest import ROOT
from tests.experiments.runs import runs_of

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(home: Path) -> dict[str, str]:
    """A private Flower home and ports; no installing, no update checks.

    One thread, as in this process: sums in another order differ by 1e-7, and three rounds with
    BatchNorm make 1e-2 of that.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


def command(*args: Any, env: dict[str, str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(a) for a in args], env=env, cwd=cwd, text=True, capture_output=True, check=False
    )


def stop(pid: int) -> None:
    """Stop one process, by its id, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)


SMALL: dict[str, Any] = {"rounds": 3, "local_epochs": 1}


def in_process(folder: Path, method: str = "FedFOR", **settings: Any) -> dict[str, np.ndarray]:
    """The final model of a method of the job, in this process."""
    runs = runs_of(**{**settings, "methods": method})
    (record,) = execute(runs, folder, Progress())
    path = record_path(folder, record.label, record.seed)
    return dict(load_file(folder / f"{path.stem}.safetensors"))


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-6, err_msg=name)


def pids_of(name: str, argument: str) -> list[int]:
    """Processes called `name` that were given `argument`."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (proc / "cmdline").read_text().split("\0")
            if any(w.endswith(name) for w in words) and argument in words:
                found.append(int(proc.name))
    return found
