"""Runs in Flower's Ray simulation, with a reliable end.

``flwr run`` exits 0 when a run failed. It leaves a server behind that keeps the folder and environment of
its first start, and it installs the app's dependencies again for every run. Here a plan gets a SuperLink of
its own, and an app in a temporary folder; each of its seeds is one Flower run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import IO

from flwr_regs.experiments import settings
from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.extras import missing_extra
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.run.estimate import announcement
from flwr_regs.experiments.run.progress import Heartbeat, Progress

PYPROJECT = """[project]
name = "flwr-regs-run"
version = "1.0.0"
[tool.flwr.app]
publisher = "flwr-regs"
[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"
[tool.flwr.app.config]
"""
APPS = {
    "server_app.py": "from flwr_regs.experiments.run import server_app\n\napp = server_app.app\n",
    "client_app.py": "from flwr_regs.experiments.run import clients\n\napp = clients.app\n",
}
"""Flower looks for an assignment to ``app`` before it imports a file."""


def execute(
    runs: Sequence[Run], folder: Path, progress: Progress, gpus: float = 0.0
) -> list[RunRecord]:
    """Train what is missing of some runs by Ray, and return their records; `gpus` is each client's share.

    The labels of the runs must be their methods. The output of Flower and Ray goes to ``flower.log``.
    Raises ImportError without Ray; RuntimeError if Flower does not start, or ends before a method of ours
    has begun.
    """
    if importlib.util.find_spec("ray") is None:
        raise missing_extra("ray", "Flower's simulation")
    missing = records.missing(runs, folder)
    if missing and not progress.quiet:
        announcement(missing, 1, progress)
    with (
        progress,
        tempfile.TemporaryDirectory(prefix="flwr-regs-", ignore_cleanup_errors=True) as temporary,
        (folder / "flower.log").open("a") as log,
        Heartbeat(progress.say) as heartbeat,
    ):
        home = Path(temporary)
        write_app(home / "app")
        heartbeat.at(f"Flower starts, its log is {log.name}")
        with superlink(home, environment(home)) as port:
            (home / "config.toml").write_text(
                f'[superlink]\ndefault = "job"\n[superlink.job]\n'
                f'address = "127.0.0.1:{port}"\ninsecure = true\n'
            )
            for seed in dict.fromkeys(run.seed for run in missing):
                of_seed = [run for run in missing if run.seed == seed]
                begun = {record.label for record in records.recorded(of_seed, folder)}
                for record in _new_records(of_seed, folder, home, log, gpus):
                    test = record.test[-1]
                    progress.round(record.label, seed, test["round"], test["accuracy"])
                    rounds = f"{test['round']} of {record.job['rounds']} rounds in Ray"
                    heartbeat.at(f"{record.label}: {rounds}")
                trained = records.recorded(of_seed, folder)
                if lost := {run.label for run in of_seed} - {r.label for r in trained} - begun:
                    raise RuntimeError(
                        f"Flower's run ended before {', '.join(sorted(lost))} began: see {log.name}"
                    )
                for record in trained:
                    progress.ended(record.label, seed, record.stopped)
    return records.recorded(runs, folder)


def write_app(folder: Path) -> None:
    """Write the Flower app of a comparison into a new folder."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT + settings.toml())
    for name, text in APPS.items():
        (folder / name).write_text(text)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: a home of their own, nothing installed."""
    tools = Path(sys.executable).parent  # this environment's commands, even if it is not activated
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def _new_records(
    runs: Sequence[Run], folder: Path, home: Path, log: IO[str], gpus: float
) -> Iterator[RunRecord]:
    """Run the methods of one seed as one Flower run; yield each record that has a new test."""
    first = runs[0].settings
    methods = "; ".join(run.method for run in runs)
    changed = replace(first, methods=methods, out=str(folder)).changed
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in changed.items()]
    (home / "run.toml").write_text("\n".join(lines))
    federation = f"num-supernodes={first.num_clients} client-resources-num-cpus=1"
    if gpus:
        federation += f" client-resources-num-gpus={gpus}"
    command = ["flwr", "run", str(home / "app"), "job", "--stream"]
    command += ["--run-config", str(home / "run.toml"), "--federation-config", federation]
    paths = [records.record_path(folder, run.label, run.seed) for run in runs]
    changed_at = {path: path.stat().st_mtime for path in paths if path.is_file()}
    process = subprocess.Popen(  # it ends when its SuperLink is gone
        command, env=environment(home), stdout=log, stderr=log, start_new_session=True
    )
    tests = dict.fromkeys(paths, 0)
    try:
        ended = False
        while not ended:
            time.sleep(0.3)
            ended = process.poll() is not None
            for path in paths:
                if not path.is_file() or path.stat().st_mtime == changed_at.get(path):
                    continue
                changed_at[path] = path.stat().st_mtime
                record = records.read(path)
                if len(record.test) > tests[path]:
                    tests[path] = len(record.test)
                    yield record
    finally:
        if process.poll() is None:
            process.kill()


@contextlib.contextmanager
def superlink(home: Path, env: dict[str, str]) -> Iterator[int]:
    """Start a SuperLink for simulations on a free port of 127.0.0.1; stop all of it at the end."""
    ports = []
    with contextlib.ExitStack() as held:  # both held open, so that they differ
        for _ in range(2):
            s = held.enter_context(socket.socket())
            s.bind(("127.0.0.1", 0))
            ports.append(s.getsockname()[1])
    keeper = [sys.executable, "-m", "flwr_regs.experiments.run.keeper", str(home)]
    command = [*keeper, "flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1"]
    command += ["--port", str(ports[0]), "--control-api-address", f"127.0.0.1:{ports[1]}"]
    log = home / "superlink.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,  # the keeper ends everything when this is closed, or we are killed
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 60
        while not _healthy(ports[0]):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the SuperLink did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield ports[0]
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


def _healthy(port: int) -> bool:
    """Return whether a server reports that it is healthy; never through a proxy."""
    connection = HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
