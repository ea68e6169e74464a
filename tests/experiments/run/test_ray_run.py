"""``flwr-regs run --runner ray``: Flower's simulation under the command; and ``flwr run``, in Ray too."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from flwr_regs import METHODS
from flwr_regs.experiments.report.run_records import RunRecord, read, record_path
from tests.experiments.test_user_code import OWN
from tests.processes import BIN, assert_same, command, environment, in_process, pids_with, stop

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]
PRIVATE = ("FedBN", "FedPer")  # they need a model with BatchNorm, or with the named layers
Ran = tuple[subprocess.CompletedProcess[str], dict[str, RunRecord], Path]
TWO: dict[str, Any] = {"rounds": 2, "local_epochs": 1}
DOMAINS = {**TWO, "num_clients": 3, "dataset": "digits-domains", "partition": "iid"}
PRIVATELY = ["FedBN+FedFOR", "FedBN+FedADC", "EFL(1.0, 0.01, 0.01)+FedBN", "FedPer('12.*')"]
OWNS = ["own_method:Decayed(rate=0.3)", "FedFOR+own_method:TERM", "failing:TERM"]


def in_ray(folder: Path, **settings: Any) -> Ran:
    """A finished command in a folder, its records by label, and the folder of its results."""
    words = [f"{name.replace('_', '-')}={value}" for name, value in settings.items()]
    line = [BIN / "flwr-regs", "run", "--runner", "ray", *words]
    done = command(*line, env=environment(folder), cwd=folder)
    (results,) = (folder / "results").iterdir()
    return done, {r.label: r for r in map(read, (results / "runs").iterdir())}, results


def test_every_method_trains_to_the_weights_of_one_process(tmp_path: Path) -> None:
    """From another folder; it ends with a table and pictures."""
    methods = [row.example for row in METHODS.values() if row.name not in (*PRIVATE, "FedFOR")]
    methods += ["FedADC+SelfDistillation+SparseTernary(density_up=0.01, density_down=0.01)"]
    methods = "; ".join(["FedFOR", *methods])
    settings = {**TWO, "num_clients": 3, "fraction_train": 0.67, "methods": methods}
    done, records, folder = in_ray(tmp_path, **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(records) == methods.count(";") + 1
    assert re.search(r"FedFOR +\d+\.\d\d +\d+\.\d\d ", done.stdout)
    assert re.search(r"FedFOR +round +2/2 +accuracy", done.stdout)
    assert not any(record.rejected for record in records.values())
    cohorts = [entry["cohort"] for entry in records["FedAvg"].rounds]
    assert [entry["replies"] for entry in records["FedFOR"].rounds] == cohorts
    assert (folder / "accuracy.png").stat().st_size > 5000
    model = dict(load_file(folder / "FedFOR-seed7.safetensors"))
    assert_same(model, in_process(tmp_path / "x", **settings))


@pytest.fixture(scope="module")
def private_and_own(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One command with private entries and own methods; the last ends its process."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_method.py").write_text(OWN)
    failing = OWN.replace("def correct", "def update(self, *_):\n        1 / 0\n\n    def correct")
    (folder / "failing.py").write_text(failing)
    dies = OWN.replace("return {", "__import__('os')._exit(9)\n        return {")
    (folder / "dies.py").write_text(dies.replace('"decay"', '"dies"'))
    return in_ray(folder, **DOMAINS, methods="; ".join([*PRIVATELY, *OWNS, "FedAvg+dies:TERM"]))


def test_private_entries_survive_in_ray(private_and_own: Ran, tmp_path: Path) -> None:
    """Clients test with what they kept: as many batches counted as they trained on."""
    _, records, folder = private_and_own
    for method in PRIVATELY:
        record = records[method]
        assert not any(e["failures"] or e["evaluate"]["failures"] for e in record.rounds)
        assert record.accuracy[-1] > record.accuracy[0] - 0.05, record.label
    method = "FedBN+FedFOR"
    model = dict(load_file(folder / f"{method}-seed7.safetensors"))
    assert not any(name.endswith("running_mean") for name in model)
    assert_same(model, in_process(tmp_path, method, **DOMAINS))


def test_a_users_own_method_runs_in_ray_and_its_failure_is_one_sentence(
    private_and_own: Ran,
) -> None:
    """From the user's folder: the server's and the clients' processes find the module there."""
    done, records, folder = private_and_own
    assert done.returncode == 1, done.stdout[-3000:]
    assert "flwr-regs: TERM, seed 7, failed" in done.stderr
    assert "ZeroDivisionError" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "one of Ray's actors died" in records["FedAvg+TERM"].error
    assert "ZeroDivisionError" in (folder / "flower.log").read_text()
    assert {record.job["code-dir"] for record in records.values()} == {str(folder.parents[1])}
    whole = [r for r in records.values() if r.ended and r.label not in PRIVATELY]
    assert [(len(record.rounds), record.rejected) for record in whole] == [(2, 0)] * 2
    assert len({record.test[-1]["loss"] for record in whole}) == 2


def test_plain_flwr_run_works_and_says_that_two_supernodes_are_few(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    out = tmp_path / "out"
    daemon: list[int] = []
    try:
        config = f"rounds=1 methods='FedAvg' local-epochs=1 out='{out}'"
        run = command(BIN / "flwr", "run", ".", "--stream", "--run-config", config, env=env)
        daemon = pids_with(f"FLWR_HOME={env['FLWR_HOME']}", "flower-superlink")
    finally:
        for pid in daemon:
            stop(pid)
    assert daemon, run.stdout + run.stderr
    assert "this run has 2 SuperNodes, but num-clients asks for 10" in run.stdout
    assert read(record_path(out, "FedAvg", 7)).clients == 2
    assert (out / "FedAvg-seed7.safetensors").is_file()
