"""The package's app by Flower's own ``flwr run``, in Ray and on SuperNodes."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from flwr_regs.experiments.report.run_records import read, record_path
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
        config = f"rounds=2 methods='FedAvg' local-epochs=1 out='{out}'"
        run = command(BIN / "flwr", "run", ".", "--stream", "--run-config", config, env=env)
        daemon = pids_of("flower-superlink", env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"])
    finally:
        for pid in daemon:
            stop(pid)
    assert daemon, run.stdout + run.stderr
    assert "this run has 2 SuperNodes, but num-clients asks for 10" in run.stdout
    assert read(record_path(out, "FedAvg", 7)).clients == 2
    assert (out / "FedAvg-seed7.safetensors").is_file()


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
