"""The examples run as written and learn; Lightning and mixed precision equal our client."""

from __future__ import annotations

import importlib.util
import logging
import tomllib
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from torch.utils.data import DataLoader

from flwr_regs import FedADC, FedADCClient, FedFOR, FedFORClient, InProcessGrid, client_app
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


def train(
    module: ModuleType, app: Any, strategy: Any, lr: float, rounds: int = 2
) -> dict[str, Any]:
    result = strategy.start(
        grid=InProcessGrid(app, 4),
        initial_arrays=ArrayRecord(module.build().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": lr, "local-epochs": 2}),
    )
    assert not any(e["failures"] for e in strategy.history)
    return {name: array.numpy() for name, array in result.arrays.items()}


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


def own_client(module: ModuleType, client: Any) -> Any:
    def client_fn(context: Context) -> Any:
        loader = DataLoader(module.data_of(context), batch_size=32, shuffle=True)
        return client(module.build(), loader)

    return client_app(client_fn)


def test_lightning_equals_the_client() -> None:
    module = load("lightning")
    module.CLIP = None  # it bites: the embedded momentum counts
    want = train(
        module,
        own_client(module, FedADCClient),
        FedADC(beta=0.7, seed=7, fraction_evaluate=0.0),
        0.05,
    )
    got = train(module, module.app, FedADC(beta=0.7, seed=7), 0.05)
    assert max(abs(want[n] - module.build().state_dict()[n].numpy()).max() for n in want) > 0.01
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-6)


def test_mixed_precision_equals_the_client_where_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32, with clipping that never bites and AdamW on both sides."""
    module = load("mixed-precision")
    strategy = {"alpha": 0.1, "seed": 7}
    mixed = train(module, module.app, FedFOR(**strategy), 0.005)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: torch.enable_grad())
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args, **kwargs: None)

    class Client(FedFORClient):
        def __init__(self, model: Any, data: Any) -> None:
            def make(params: Any, lr: float) -> Any:
                return torch.optim.AdamW(params, lr=lr, weight_decay=0.01)

            super().__init__(model, data, optimizer=make)

    plain = train(module, module.app, FedFOR(**strategy), 0.005)
    want = train(
        module, own_client(module, Client), FedFOR(**strategy, fraction_evaluate=0.0), 0.005
    )
    for name in want:
        np.testing.assert_allclose(plain[name], want[name], rtol=0, atol=1e-6)
    assert max(abs(mixed[n] - plain[n]).max() for n in plain) > 1e-4


def test_with_lora_only_the_trained_part_travels(capsys: pytest.CaptureFixture[str]) -> None:
    module = load("lora")
    context = Context(1, 1, {}, RecordDict(), {"rounds": 6})
    module.server(InProcessGrid(module.app, 4), context)
    lines = capsys.readouterr().out.splitlines()
    assert float(lines[-1].split()[-1].rstrip("%")) > 60
    size = sum(p.numel() * 4 for p in module.build().parameters())
    down, up = (part.split()[-3] for part in lines[-1].split(", ")[:2])
    told = (ROOT / "docs" / "models.md").read_text()
    assert (
        f"The model has {size / 1000:.1f} kB. A round moves {down} kB down and {up} kB up" in told
    )
