"""Methods on a real federation, with TLS and node authentication, give the weights that one process gives.

The app is that of docs/deployment.md, or the package's own.
"""

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from safetensors.numpy import load_file

from benchmarks.faults.federation import Federation
from flwr_regs import InProcessGrid
from flwr_regs.experiments.report.run_records import read, record_path
from tests import processes
from tests.conftest import ROOT
from tests.processes import assert_same

pytestmark = [pytest.mark.flower, pytest.mark.timeout(900)]
APP = ROOT / "docs/examples/deployment/app"
PAGE = ROOT / "docs/deployment.md"
NODES = 2
METHODS = ["EFL(0.1, density_up=0.1, density_down=0.1)", "RFedAvgPlus(0.01, downlink='delta')"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("federation"), NODES) as running:
        yield running


def in_process(monkeypatch: pytest.MonkeyPatch, out: Path, **config: Any) -> dict[str, np.ndarray]:
    """The final model of the same app in this process."""
    monkeypatch.syspath_prepend(str(APP))
    settings = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    settings |= {k.replace("_", "-"): v for k, v in config.items()} | {"out": str(out)}
    try:
        import client
        import server

        grid = InProcessGrid(client.app, NODES, settings)
        server.app(grid, Context(1, 1, {}, RecordDict(), settings))
    finally:
        for name in ("client", "server", "task"):
            sys.modules.pop(name, None)
    return dict(load_file(out / "model.safetensors"))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.partition("(")[0])
def test_a_federation_gives_the_weights_of_one_process(
    federation: Federation, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"method": method, "num_server_rounds": 2, "fraction_evaluate": 0.0}
    run = federation.run(APP, **config, out=str(tmp_path / "deployed"))
    status = federation.wait(run)
    assert status[0] == "finished:completed", federation.log(run)
    lines = (tmp_path / "deployed/history.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    assert [entry["failures"] for entry in history] == [{}, {}]
    assert [entry["lost_state"] for entry in history] == [[], []]
    got = dict(load_file(tmp_path / "deployed/model.safetensors"))
    assert_same(got, in_process(monkeypatch, tmp_path / "in-process", **config))


def test_private_entries_survive_on_supernodes(federation: Federation, tmp_path: Path) -> None:
    """Every message is a new process there: what is private lives in the node's state alone."""
    settings = {"rounds": 2, "local_epochs": 1, "num_clients": NODES, "dataset": "digits-domains"}
    settings["partition"] = "iid"
    method, out = "FedBN+FedFOR", tmp_path / "out"
    run = federation.run(ROOT, **settings, methods=method, out=str(out))
    assert federation.wait(run)[0] == "finished:completed", federation.log(run)
    record = read(record_path(out, method, 7))
    assert [entry["lost_private"] for entry in record.rounds] == [[], []]
    here = processes.in_process(tmp_path / "x", method, **settings)
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


def test_the_operators_commands_of_the_page_run(federation: Federation) -> None:
    """After a run: those that show runs, nodes and logs."""
    lines = re.findall(r"^flwr (?:list|log|supernode list) .*$", PAGE.read_text(), re.MULTILINE)
    assert len(lines) == 3
    runs = federation.runs() or [federation.run(APP, rounds=1, fraction_evaluate=0.0)]
    for line in lines:
        federation.flwr(*shlex.split(line.replace("<run>", str(runs[0])))[1:])
