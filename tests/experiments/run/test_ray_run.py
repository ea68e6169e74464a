"""``flwr-regs run --runner ray``: Flower's simulation under the command."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from flwr_regs import METHODS
from flwr_regs.experiments.report.run_records import RunRecord, read
from tests.experiments.test_user_code import OWN
from tests.processes import BIN, SMALL, assert_same, command, environment, in_process

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]
PRIVATE = ("FedBN", "FedPer")  # they need a model with BatchNorm, or with the named layers
PRIVATELY = "FedBN+FedFOR; FedBN+FedADC; EFL(1.0, 0.01, 0.01)+FedBN; FedPer('12.*')"


def in_ray(folder: Path, **settings: Any) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A finished command in a folder, and the folder of its results."""
    words = [f"{name.replace('_', '-')}={value}" for name, value in settings.items()]
    line = [BIN / "flwr-regs", "run", "--runner", "ray", *words]
    done = command(*line, env=environment(folder), cwd=folder)
    (results,) = (folder / "results").iterdir()
    return done, results


def trained(folder: Path, **settings: Any) -> tuple[str, dict[str, RunRecord], Path]:
    """What a command printed, its records by label, and the folder of its results."""
    done, results = in_ray(folder, **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [read(path) for path in (results / "runs").iterdir()]
    return done.stdout, {record.label: record for record in records}, results


def test_every_method_trains_to_the_weights_of_one_process(tmp_path: Path) -> None:
    """From another folder; it ends with a table and pictures."""
    methods = [row.example for row in METHODS.values() if row.name not in (*PRIVATE, "FedFOR")]
    methods += ["FedADC+SelfDistillation+SparseTernary(density_up=0.01, density_down=0.01)"]
    settings = {**SMALL, "fraction_train": 0.5, "methods": "; ".join(["FedFOR", *methods])}
    out, records, folder = trained(tmp_path, **settings)
    assert len(records) == len(methods) + 1
    assert re.search(r"FedFOR +\d+\.\d\d +\d+\.\d\d ", out)
    assert re.search(r"FedFOR +round +3/3 +accuracy", out)
    assert not any(record.rejected for record in records.values())
    cohorts = [entry["cohort"] for entry in records["FedAvg"].rounds]
    assert [entry["replies"] for entry in records["FedFOR"].rounds] == cohorts
    assert (folder / "accuracy.png").stat().st_size > 5000
    model = dict(load_file(folder / "FedFOR-seed7.safetensors"))
    assert_same(model, in_process(tmp_path / "x", **settings))


def test_private_entries_survive_in_ray(tmp_path: Path) -> None:
    """Clients test with what they kept: as many batches counted as they trained on."""
    settings = {"rounds": 2, "local_epochs": 1, "num_clients": 5, "dataset": "digits-domains"}
    settings |= {"partition": "iid", "methods": PRIVATELY}
    _, records, folder = trained(tmp_path, **settings)
    for record in records.values():
        assert not any(e["failures"] or e["evaluate"]["failures"] for e in record.rounds)
        assert record.accuracy[-1] > record.accuracy[0] - 0.05, record.label
    method = "FedBN+FedFOR"
    model = dict(load_file(folder / f"{method}-seed7.safetensors"))
    assert not any(name.endswith("running_mean") for name in model)
    assert_same(model, in_process(tmp_path / "x", method, **settings))


def test_a_users_own_method_runs_in_ray_and_its_failure_is_one_sentence(tmp_path: Path) -> None:
    """From the user's folder: the server's and the clients' processes find the module there."""
    (tmp_path / "own_method.py").write_text(OWN)
    failing = OWN.replace("def correct", "def update(self, *_):\n        1 / 0\n\n    def correct")
    (tmp_path / "failing.py").write_text(failing)
    methods = "own_method:Decayed(rate=0.3), FedFOR+own_method:TERM, failing:TERM"
    done, folder = in_ray(tmp_path, rounds=2, local_epochs=1, num_clients=3, methods=methods)
    assert done.returncode == 1, done.stdout[-3000:]
    assert "flwr-regs: TERM, seed 7, failed" in done.stderr
    assert "ZeroDivisionError" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "ZeroDivisionError" in (folder / "flower.log").read_text()
    records = [read(path) for path in (folder / "runs").iterdir()]
    assert {record.job["code-dir"] for record in records} == {str(tmp_path)}
    whole = [record for record in records if record.ended]
    assert [(len(record.rounds), record.rejected) for record in whole] == [(2, 0)] * 2
    assert len({record.test[-1]["loss"] for record in whole}) == 2
