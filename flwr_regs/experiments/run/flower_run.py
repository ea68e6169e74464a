"""Runs in Flower's Ray simulation, in a process of their own, and with a reliable end.

``flwr run`` exits 0 when a run failed. It leaves a server behind that keeps the folder and environment of
its first start, and it installs the app's dependencies again for every run. So a process under a keeper
runs the same apps (``python -m flwr_regs.experiments.run.flower_run FILE``); Ray's processes end with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.extras import missing_extra
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.run.clients import SimulatedClients
from flwr_regs.experiments.run.estimate import announcement
from flwr_regs.experiments.run.progress import Heartbeat, Progress
from flwr_regs.experiments.run.server_app import compare


def execute(
    runs: Sequence[Run], folder: Path, progress: Progress, gpus: float = 0.0
) -> list[RunRecord]:
    """Train what is missing of some runs by Ray, and return their records; `gpus` is each client's share.

    The labels of the runs must be their methods. The output of Flower and Ray goes to ``flower.log``.
    Raises ImportError without Ray; RuntimeError if its process ends before a run has begun.
    """
    if importlib.util.find_spec("ray") is None:
        raise missing_extra("ray", "Flower's simulation")
    missing = records.missing(runs, folder)
    if missing and not progress.quiet:
        announcement(missing, 1, progress)
    with (
        progress,
        (folder / "flower.log").open("a") as log,
        Heartbeat(progress.say) as heartbeat,
    ):
        heartbeat.at(f"Ray starts, its log is {log.name}")
        for record in _new_records(missing, folder, log, gpus):
            test = record.test[-1]
            progress.round(record.label, record.seed, test["round"], test["accuracy"])
            heartbeat.at(f"{record.label}: {test['round']} of {record.job['rounds']} rounds in Ray")
        trained = records.recorded(missing, folder)
        for record in trained:
            progress.ended(record.label, record.seed, record.stopped)
    if len(trained) < len(missing):
        raise RuntimeError(f"Ray's process ended before every run began: see {folder}/flower.log")
    return records.recorded(runs, folder)


def _new_records(
    runs: Sequence[Run], folder: Path, log: IO[str], gpus: float
) -> Iterator[RunRecord]:
    """Train in a process of its own; yield each record that has a new test."""
    paths = [records.record_path(folder, run.label, run.seed) for run in runs]
    changed_at = {path: path.stat().st_mtime for path in paths if path.is_file()}
    with tempfile.TemporaryDirectory(prefix="flwr-regs-", ignore_cleanup_errors=True) as home:
        work = Path(home, "runs.pickle")
        work.write_bytes(pickle.dumps((runs, folder, gpus)))
        command = ["-m", "flwr_regs.experiments.run.keeper", home, sys.executable]
        command += ["-m", "flwr_regs.experiments.run.flower_run", str(work)]
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "FLWR_HOME": home, "FLWR_DISABLE_UPDATE_CHECK": "1"},
            stdin=subprocess.PIPE,  # the keeper ends everything when this is closed, or we are killed
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            ended = False
            while not ended:
                time.sleep(0.3)
                ended = process.poll() is not None
                for path in paths:
                    if not path.is_file() or path.stat().st_mtime == changed_at.get(path):
                        continue
                    changed_at[path] = path.stat().st_mtime
                    if (record := records.read(path)).test:
                        yield record
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def simulate(runs: Sequence[Run], folder: Path, gpus: float) -> None:
    """Train the runs of one seed, which share their clients, in this process and Ray's."""
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        number = runs[0].settings.num_clients
        while len([*grid.get_node_ids()]) < number:  # it starts before they are there
            time.sleep(0.05)
        compare(runs, grid, folder)

    run_simulation(
        server,
        SimulatedClients(tuple(runs)).app(),
        runs[0].settings.num_clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": gpus}},
    )


if __name__ == "__main__":
    given, results, share = pickle.loads(Path(sys.argv[1]).read_bytes())  # our own file
    for seed in dict.fromkeys(run.seed for run in given):
        with contextlib.suppress(
            RuntimeError
        ):  # the record says why; the other seeds have their turn
            simulate([run for run in given if run.seed == seed], results, share)
