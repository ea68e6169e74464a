"""The examples run as written and learn."""

import logging
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from sklearn.datasets import load_digits

from flwr_regs import InProcessGrid
from tests.conftest import ROOT

EXAMPLES = ROOT / "docs" / "examples"


def load(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / name / "app.py")))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


NAMES = ["huggingface", "lightning", "mixed-precision", "pytorch", "sklearn"]
SAMPLED = [
    pytest.param(n, marks=[pytest.mark.full] * (n not in ("pytorch", "sklearn")))
    for n in (*NAMES, "lora")
]
"""Two always; the others import what takes longer than their runs."""


@pytest.mark.parametrize("name", SAMPLED[:-1])
def test_the_server_app_runs_as_written_and_learns(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(name)
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())
    settings = project["tool"]["flwr"]["app"]
    assert settings["components"] == {"serverapp": "app:server", "clientapp": "app:app"}
    context = Context(1, 1, {}, RecordDict(), settings["config"])
    module.server(InProcessGrid(module.app, 4), context)
    told = [float(line.split()[-1].rstrip("%")) for line in capsys.readouterr().out.splitlines()]
    assert len(told) == settings["config"]["rounds"]
    assert told[-1] > max(60, told[0])


@pytest.mark.parametrize("name", SAMPLED)
def test_a_node_without_a_partition_trains_on_its_data_path(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a SuperNode started with ``--node-config 'data-path="…"'``."""
    module = load(name)
    if name in ("huggingface", "lora"):
        rows = module.made_up(0)
        np.savez(tmp_path / "local.npz", **{k: np.stack([r[k] for r in rows]) for k in rows[0]})
    else:
        x, y = load_digits(return_X_y=True)
        np.savez(tmp_path / "local.npz", x=x[:300], y=y[:300])
    grid = InProcessGrid(module.app, 2)
    for node in grid.get_node_ids():
        grid._contexts[node].node_config.clear()
        grid._contexts[node].node_config["data-path"] = str(tmp_path / "local.npz")
    module.server(grid, Context(1, 1, {}, RecordDict(), {"rounds": 1}))
    assert "round 1" in capsys.readouterr().out


@pytest.mark.full
def test_with_lora_only_the_trained_part_travels(capsys: pytest.CaptureFixture[str]) -> None:
    module = load("lora")
    context = Context(1, 1, {}, RecordDict(), {"num-server-rounds": 6})
    module.server(InProcessGrid(module.app, 4), context)
    lines = capsys.readouterr().out.splitlines()
    assert float(lines[-1].split()[-1].rstrip("%")) > 60
    size = sum(p.numel() * 4 for p in module.build().parameters())
    down, up = (float(part.split()[-3]) for part in lines[-1].split(", ")[:2])
    assert max(down, up) < size / 1000 / 4
