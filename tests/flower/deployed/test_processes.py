"""The same app on Flower's own runtimes: Ray by ``flwr run``, and a real SuperLink with SuperNodes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from flwr_regs.experiments.report.run_records import read, record_path
from tests.conftest import ROOT
from tests.processes import (
    BIN,
    assert_same,
    command,
    deployment,
    environment,
    in_process,
    pids_of,
    stop,
)

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]
# Round 2 is the first with state from another round. Each message starts a process: no round more.
TWO: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "num_clients": 2}


def test_plain_flwr_run_works_and_says_that_two_supernodes_are_few(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    out = tmp_path / "out"
    daemon: list[int] = []
    try:
        run = command(
            BIN / "flwr",
            "run",
            ".",
            "--stream",
            "--run-config",
            f"rounds=2 methods='FedAvg' local-epochs=1 out='{out}'",
            env=env,
        )
        daemon = pids_of("flower-superlink", env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"])
    finally:
        for pid in daemon:
            stop(pid)
    assert daemon, run.stdout + run.stderr
    assert "this run has 2 SuperNodes, but num-clients asks for 10" in run.stdout
    assert read(record_path(out, "FedAvg", 7)).clients == 2
    assert (out / "FedAvg-seed7.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("lightning", 10), ("sklearn", 5)],
)
def test_the_examples_run_in_ray(tmp_path: Path, name: str, rounds: int) -> None:
    env = environment(tmp_path)
    nodes = "num-supernodes=4 client-resources-num-cpus=1"
    args = ["run", ROOT / "docs" / "examples" / name, "--stream", "--federation-config", nodes]
    daemon: list[int] = []
    try:
        run = command(BIN / "flwr", *args, env=env)
        daemon = pids_of("flower-superlink", env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"])
    finally:
        for pid in daemon:
            stop(pid)
    found = re.findall(r"round (\d+): mean accuracy on the clients (\d+\.\d)%", run.stdout)
    assert [int(r) for r, _ in found] == list(range(1, rounds + 1)), (
        run.stdout[-3000:] + run.stderr[-3000:]
    )
    assert float(found[-1][1]) > 60


def test_private_entries_survive_on_supernodes(tmp_path: Path) -> None:
    """Every message is a new process there: what is private lives in the node's state alone."""
    settings = {**TWO, "dataset": "digits-domains", "partition": "iid"}
    method = "FedBN+FedFOR"
    out = tmp_path / "out"
    config = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in settings.items())
    with deployment(tmp_path, 2) as (env, supernode):
        for partition in range(2):
            supernode(partition)
        args = ["run", ".", "dep", "--stream", "-c", f"{config} methods='{method}' out='{out}'"]
        run = command(BIN / "flwr", *args, env=env)
    assert (out / "runs").is_dir(), run.stdout[-3000:] + run.stderr[-3000:]
    record = read(record_path(out, method, 7))
    assert [entry["lost_private"] for entry in record.rounds] == [[], []]
    here = in_process(tmp_path / "x", method, **settings)
    assert_same(dict(load_file(out / f"{method}-seed7.safetensors")), here)
    told, want = (
        [
            {pid: m["accuracy"] for pid, m in r["evaluate"]["clients"].items()}
            for r in read(record_path(folder, method, 7)).rounds
        ]
        for folder in (out, tmp_path / "x")
    )
    for there, theirs in zip(told, want, strict=True):  # tested with BatchNorm of their own
        assert there == pytest.approx(theirs)
    assert all(len(set(clients.values())) == 2 for clients in told[1:])


LEGACY = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.client import NumPyClient
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from flwr_regs import FedAvg, client_app

class Mine(NumPyClient):
    def __init__(self, target): self.target = target
    def fit(self, parameters, config):
        w = parameters[0]
        for _ in range(config["local-steps"]): w = w - config["lr"] * (w - self.target)
        return [w, parameters[1]], 5 + self.target, {"note": "text stays out of the means"}
    def evaluate(self, parameters, config):
        return float(np.abs(parameters[0] - self.target).mean()), 5, {"accuracy": 1.0}

app = client_app(lambda context: Mine(int(context.node_config["partition-id"])).to_client())
server = ServerApp()

@server.main()
def main(grid, context):
    strategy = FedAvg(seed=1)
    start = ArrayRecord([np.zeros(3), np.asarray(7)])
    config = ConfigRecord({"lr": 0.5, "local-steps": 2})
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=2, train_config=config)
    print("RESULT", [a.numpy().tolist() for a in result.arrays.values()], strategy.history[-1]["replies"])

run_simulation(server, app, 3, backend_config={"client_resources": {"num_cpus": 1}})
"""


def test_a_users_plain_numpy_client_runs_in_ray(tmp_path: Path) -> None:
    script = tmp_path / "legacy.py"
    script.write_text(LEGACY)
    run = command(sys.executable, script, env=environment(tmp_path), cwd=tmp_path)
    # targets 0, 1, 2 with weights 5, 6, 7 of 18: mean 20/18; two half-steps twice leave 1/16 to go
    want = 20 / 18 * (1 - 1 / 16)
    (line,) = [x for x in run.stdout.splitlines() if x.startswith("RESULT")] or [run.stderr[-3000:]]
    numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", line)]
    assert numbers[:3] == pytest.approx([want] * 3, abs=1e-12)
    assert line.endswith("7] [0, 1, 2]")
