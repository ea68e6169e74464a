"""``flwr-regs run --runner ray``: Flower's simulation under the command, and what is left when it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from flwr_regs import METHODS
from flwr_regs.experiments.calls import parse_methods
from flwr_regs.experiments.report.run_records import read, record_path
from tests.conftest import ROOT
from tests.experiments.test_user_code import OWN
from tests.processes import BIN, SMALL, assert_same, command, environment, in_process

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]
PRIVATE = ("FedBN", "FedPer")  # they need a model with BatchNorm, or with the named layers
PRIVATELY = "FedBN+FedFOR, FedBN+FedADC, EFL(1.0, 0.01, 0.01)+FedBN, FedPer('12.*')"


def test_flwr_regs_run_ends_with_a_table_a_plot_and_a_history(tmp_path: Path) -> None:
    """Ray; from another folder; and the weights are those of one process."""
    methods = [row.example for row in METHODS.values() if row.name not in (*PRIVATE, "FedFOR")]
    methods += ["FedADC+SelfDistillation+SparseTernary(density_up=0.01, density_down=0.01)"]
    settings = {**SMALL, "fraction_train": 0.5, "methods": "; ".join(["FedFOR", *methods])}
    methods = list(parse_methods(settings["methods"]))
    args = [f"{k.replace('_', '-')}={v}" for k, v in settings.items()]
    run = command(
        BIN / "flwr-regs", "run", "--runner", "ray", *args, env=environment(tmp_path), cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (folder,) = (tmp_path / "results").iterdir()
    assert str(folder) in run.stdout
    assert re.search(r"FedFOR +\d+\.\d\d +\d+\.\d\d ", run.stdout)
    assert re.search(r"FedFOR +round +3/3 +accuracy", run.stdout)
    records = {method: read(record_path(folder, method, 7)) for method in methods}
    assert not any(record.rejected for record in records.values())
    assert records["FedFOR"].clients == 10
    assert [e["replies"] for e in records["FedFOR"].rounds] == [
        e["cohort"] for e in records["FedAvg"].rounds
    ]
    assert (folder / "accuracy.png").stat().st_size > 5000
    assert_same(
        dict(load_file(folder / "FedFOR-seed7.safetensors")), in_process(tmp_path / "x", **settings)
    )


def test_private_entries_survive_in_ray(tmp_path: Path) -> None:
    """Clients test with what they kept: as many batches counted as they trained on."""
    settings = {"rounds": 2, "local_epochs": 1, "num_clients": 5, "dataset": "digits-domains"}
    settings |= {"partition": "iid", "methods": PRIVATELY}
    args = [f"{k.replace('_', '-')}={v}" for k, v in settings.items()]
    run = command(
        BIN / "flwr-regs", "run", "--runner", "ray", *args, env=environment(tmp_path), cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (folder,) = (tmp_path / "results").iterdir()
    for path in (folder / "runs").iterdir():
        record = read(path)
        assert not any(e["failures"] or e["evaluate"]["failures"] for e in record.rounds)
        assert record.accuracy[-1] > record.accuracy[0] - 0.05, record.label
    method = "FedBN+FedFOR"
    got = dict(load_file(folder / f"{method}-seed7.safetensors"))
    assert not any(name.endswith("running_mean") for name in got)
    assert_same(got, in_process(tmp_path / "x", method, **settings))


def test_a_users_own_method_runs_in_ray(tmp_path: Path) -> None:
    """From the user's folder: the server's and the clients' processes find the module there."""
    (tmp_path / "own_method.py").write_text(OWN)
    settings = {"rounds": 2, "local_epochs": 1, "num_clients": 3}
    settings |= {"methods": "own_method:Decayed(rate=0.3), FedFOR+own_method:TERM, FedAvg"}
    args = [f"{k.replace('_', '-')}={v}" for k, v in settings.items()]
    run = command(
        BIN / "flwr-regs", "run", "--runner", "ray", *args, env=environment(tmp_path), cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (folder,) = (tmp_path / "results").iterdir()
    records = [read(path) for path in (folder / "runs").iterdir()]
    assert {record.job["code-dir"] for record in records} == {str(tmp_path)}
    assert [(len(record.rounds), record.rejected) for record in records] == [(2, 0)] * 3
    assert len({record.test[-1]["loss"] for record in records}) == 3


def test_flwr_regs_run_fails_when_the_run_failed(tmp_path: Path) -> None:
    (tmp_path / "own_method.py").write_text(
        OWN.replace("def correct", "def update(self, *_):\n        1 / 0\n\n    def correct")
    )
    run = command(
        BIN / "flwr-regs",
        *("run", "--runner", "ray", "methods=own_method:TERM", "num-clients=5"),
        env=environment(tmp_path),
        cwd=tmp_path,
    )
    assert run.returncode == 1, run.stdout[-3000:]
    assert "own_method:TERM, seed 7, failed: ZeroDivisionError" in run.stderr
    assert len((run.stdout + run.stderr).splitlines()) < 30
    (folder,) = (tmp_path / "results").iterdir()
    assert "ZeroDivisionError" in (folder / "flower.log").read_text()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(signal.SIGINT, marks=pytest.mark.full),
        signal.SIGKILL,
    ],
)
def test_flwr_regs_run_leaves_nothing_behind_when_stopped(tmp_path: Path, how: int) -> None:
    """Found by a mark in the environment that every process it starts inherits."""
    env = {**environment(tmp_path), "FLWR_REGS_TEST_MARK": str(tmp_path)}
    log = tmp_path / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [BIN / "flwr-regs", "run", "--runner", "ray", "rounds=2000", f"out={tmp_path / 'out'}"],
            env=env,
            cwd=ROOT,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # a script in the background ignores Ctrl-C, and its children inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        for _ in range(600):
            if list((tmp_path / "out").glob("runs/*")) or process.poll() is not None:
                break
            time.sleep(0.2)
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # a terminal's Ctrl-C reaches the whole foreground group
        else:
            os.kill(process.pid, how)
        status = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[how]
        assert process.wait(60) == status, log.read_text()[-2000:]
        mark = f"FLWR_REGS_TEST_MARK={tmp_path}"
        for _ in range(50):
            left = [p for p in Path("/proc").glob("[0-9]*") if mark in environ_of(p)]
            if not left:
                break
            time.sleep(0.2)
        assert not left, [(p / "cmdline").read_text() for p in left]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def environ_of(proc: Path) -> str:
    with contextlib.suppress(OSError):
        return (proc / "environ").read_text(errors="replace")
    return ""
