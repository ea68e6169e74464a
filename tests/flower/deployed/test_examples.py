"""The examples run as written and learn."""

from __future__ import annotations

import importlib.util
import logging
import tomllib
from types import ModuleType

import pytest
from flwr.app import Context, RecordDict

from flwr_regs import InProcessGrid
from tests.conftest import ROOT

EXAMPLES = ROOT / "docs" / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name.replace("-", "_"), EXAMPLES / name / "app.py"
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.parametrize(
    "name", ["huggingface", "lightning", "mixed-precision", "pytorch", "sklearn"]
)
def test_the_server_app_runs_as_written_and_learns(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(name)
    settings = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())["tool"]["flwr"][
        "app"
    ]
    assert settings["components"] == {"serverapp": "app:server", "clientapp": "app:app"}
    context = Context(1, 1, {}, RecordDict(), settings["config"])
    module.server(InProcessGrid(module.app, 4), context)
    told = [float(line.split()[-1].rstrip("%")) for line in capsys.readouterr().out.splitlines()]
    assert len(told) == settings["config"]["rounds"]
    assert told[-1] > max(60, told[0])


def test_with_lora_only_the_trained_part_travels(capsys: pytest.CaptureFixture[str]) -> None:
    module = load("lora")
    context = Context(1, 1, {}, RecordDict(), {"rounds": 6})
    module.server(InProcessGrid(module.app, 4), context)
    lines = capsys.readouterr().out.splitlines()
    assert float(lines[-1].split()[-1].rstrip("%")) > 60
    size = sum(p.numel() * 4 for p in module.build().parameters())
    down, up = (float(part.split()[-3]) for part in lines[-1].split(", ")[:2])
    assert max(down, up) < size / 1000 / 4
