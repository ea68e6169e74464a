"""Methods on a real federation, with TLS and node authentication, give the weights that one process gives.

The app is that of docs/deployment.md.
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
from tests.conftest import ROOT
from tests.processes import assert_same

pytestmark = [pytest.mark.flower, pytest.mark.timeout(900)]
APP = ROOT / "docs/examples/deployment/app"
PAGE = ROOT / "docs/deployment.md"
NODES = 3
METHODS = [
    "FedFOR(alpha=0.1, downlink='delta')",
    "EFL(lam=0.1, density_up=0.1, density_down=0.1)",
    "RFedAvgPlus(lam=0.01)",
]


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


def test_the_operators_commands_of_the_page_run(federation: Federation) -> None:
    """After a run: those that show runs, nodes and logs."""
    lines = re.findall(r"^flwr (?:list|log|supernode list) .*$", PAGE.read_text(), re.MULTILINE)
    assert len(lines) == 3
    runs = federation.runs() or [federation.run(APP, rounds=1, fraction_evaluate=0.0)]
    for line in lines:
        federation.flwr(*shlex.split(line.replace("<run>", str(runs[0])))[1:])
