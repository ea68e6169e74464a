"""What tests on Flower's own runtimes need: a private environment, and a SuperLink with SuperNodes."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import flwr
import numpy as np
from safetensors.numpy import load_file

from flwr_regs.experiments.report.run_records import record_path
from flwr_regs.experiments.run.engine import execute
from flwr_regs.experiments.run.progress import Progress
from tests.conftest import ROOT, close
from tests.conftest import until as until
from tests.experiments.runs import runs_of

BIN = Path(sys.executable).parent
FLOWER = tuple(map(int, flwr.__version__.split(".")[:2]))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(home: Path) -> dict[str, str]:
    """A private Flower home and ports; no installing, no update checks, short waits for the next task.

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
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
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


def in_process(folder: Path, method: str = "FedFOR", **settings: Any) -> dict[str, np.ndarray]:
    """The final model of a method of the job, in this process."""
    runs = runs_of(**{**settings, "methods": method})
    (record,) = execute(runs, folder, Progress())
    path = record_path(folder, record.label, record.seed)
    return dict(load_file(folder / f"{path.stem}.safetensors"))


assert_same = partial(close, tol=1e-6)


def pids_with(setting: str, word: str = "") -> list[int]:
    """The processes that have a setting in their environment, which children inherit, and hold a word."""
    pids = []
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = setting in (proc / "environ").read_text(errors="replace").split("\0")
            if marked and word in (proc / "cmdline").read_text():
                pids.append(int(proc.name))
    return pids


def app_for(env: dict[str, str], app: Path, copy: Path) -> Path:
    """The app's folder; for Flower before 1.26 a copy, which names the connection ``dep``."""
    if FLOWER >= (1, 26):
        return app
    shutil.copytree(app, copy)
    connection = f'address = "127.0.0.1:{env["CONTROL_PORT"]}"\ninsecure = true\n'
    with (copy / "pyproject.toml").open("a") as file:
        file.write(f"\n[tool.flwr.federations.dep]\n{connection}")
    return copy


def ports_of(control: int, fleet: int) -> tuple[list[Any], Callable[[], list[Any]]]:
    """The options of a SuperLink, and those of each SuperNode, for this Flower's interfaces.

    All speak HTTP on one port from 1.40 on. Messages go over gRPC up to 1.39, and all else up to 1.34.
    """
    http = ["--host", "127.0.0.1", "--port"]
    messages = ["--fleet-api-address", f"127.0.0.1:{fleet}"]
    if FLOWER >= (1, 40):
        return [*http, control], lambda: [*http, free_port()]
    if FLOWER >= (1, 35):
        return [*http, control, *messages], lambda: [*http, free_port()]
    others = {"--control-api-address": control, "--serverappio-api-address": free_port()}
    addresses = [word for key, port in others.items() for word in (key, f"127.0.0.1:{port}")]
    app = "--clientappio-api-address"
    return [*messages, *addresses], lambda: [app, f"127.0.0.1:{free_port()}"]


@contextlib.contextmanager
def deployment(tmp_path: Path, nodes: int) -> Iterator[tuple[dict[str, str], Any]]:
    """A SuperLink and `nodes` SuperNodes on loopback; the connection is called ``dep``.

    Yields (environment, function from a partition id to a new SuperNode's process). Before Flower 1.26 the
    connection stands in the app's pyproject.toml: see `app_for`.
    """
    env = environment(tmp_path / "home")
    (tmp_path / "home").mkdir()
    control, fleet = free_port(), free_port()
    of_superlink, of_supernode = ports_of(control, fleet)
    env["CONTROL_PORT"] = str(control)
    processes = []

    def launch(name: str, *args: Any, **extra: str) -> subprocess.Popen[bytes]:
        log = (tmp_path / f"{len(processes)}.log").open("w")
        processes.append(
            subprocess.Popen(
                [str(a) for a in (BIN / name, "--insecure", *args)],
                env={**env, **extra},
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
            )
        )
        return processes[-1]

    def supernode(partition: int) -> subprocess.Popen[bytes]:
        return launch(
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{control if FLOWER >= (1, 40) else fleet}"),
            *of_supernode(),
            *("--node-config", f"partition-id={partition} num-partitions={nodes}"),
            FLWR_HOME=str(tmp_path / f"node{len(processes)}"),
        )

    try:
        launch("flower-superlink", *of_superlink)
        (tmp_path / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "dep"\n[superlink.dep]\n'
            f'address = "127.0.0.1:{control}"\ninsecure = true\n'
        )
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", control), 2):
                break
            time.sleep(0.2)
        yield env, supernode
    finally:
        for process in reversed(processes):
            stop(process.pid)
