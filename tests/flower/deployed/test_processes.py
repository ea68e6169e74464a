"""The package's app by Flower's own ``flwr run``, in Ray."""

from pathlib import Path

import pytest

from flwr_regs.experiments.report.run_records import read, record_path
from tests.processes import BIN, command, environment, pids_of, stop

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]


def test_plain_flwr_run_works_and_says_that_two_supernodes_are_few(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    out = tmp_path / "out"
    daemon: list[int] = []
    try:
        config = f"rounds=1 methods='FedAvg' local-epochs=1 out='{out}'"
        run = command(BIN / "flwr", "run", ".", "--stream", "--run-config", config, env=env)
        daemon = pids_of("flower-superlink", env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"])
    finally:
        for pid in daemon:
            stop(pid)
    assert daemon, run.stdout + run.stderr
    assert "this run has 2 SuperNodes, but num-clients asks for 10" in run.stdout
    assert read(record_path(out, "FedAvg", 7)).clients == 2
    assert (out / "FedAvg-seed7.safetensors").is_file()
