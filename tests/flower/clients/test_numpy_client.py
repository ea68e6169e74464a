"""docs/examples/numpy-client: a client that knows only docs/protocol.md, beside the package's own."""

import runpy
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from torch import nn

import flwr_regs as fr
from flwr_regs.testing.problem import SerialisingGrid, app_of, train
from tests.conftest import QUIET, ROOT, close, drawn

FILE = ROOT / "docs/examples/numpy-client/client.py"
EXAMPLE = runpy.run_path(str(FILE))
DATA = [[(torch.tensor(x), torch.tensor(y)) for x, y in EXAMPLE["load"](k)] for k in range(4)]


def model() -> nn.Linear:
    with drawn():
        return nn.Linear(4, 3)


def run(strategy: Any, client: Any, foreign: set[int], length: dict[str, int]) -> Any:
    """Train with the example in the place of the `foreign` clients; return the models and the history."""
    ours = app_of(client, DATA, model)

    def either(message: Message, context: Context) -> Message:
        app = EXAMPLE["app"] if context.node_config["partition-id"] in foreign else ours
        reply: Message = app(message, context)
        return reply

    grid = SerialisingGrid(either, 4)  # type: ignore[arg-type]
    models = train(strategy, client, model=model, clients=DATA, grid=grid, length=length)
    return models, strategy.history


METHODS = {
    "FedAvg": (fr.FedAvg, fr.FedAvgClient),
    "FedFOR": (partial(fr.FedFOR, alpha=0.3), fr.FedFORClient),
    "FedFOR, default alpha": (fr.FedFOR, fr.FedFORClient),
    "FedFOR, delta": (partial(fr.FedFOR, downlink="delta"), fr.FedFORClient),
}


@pytest.mark.parametrize(
    ("name", "length"),
    list(zip(METHODS, [{"local-epochs": 2}, {"local-steps": 5}] * 2, strict=True)),
)
def test_it_trains_as_the_packages_clients_do(name: str, length: dict[str, int]) -> None:
    make, client = METHODS[name]
    want, _ = run(make(**QUIET), client, set(), length)
    got, history = run(make(**QUIET), client, {1, 3}, length)
    assert [e["replies"] for e in history] == [[0, 1, 2, 3]] * 4
    assert [e["failures"] for e in history] == [{}] * 4
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-6)
    steps = history[-1]["steps"]
    assert steps[1] == steps[0]


def test_it_says_what_it_cannot_do() -> None:
    strategy = fr.FedAvg(**QUIET)
    _, history = run(strategy, fr.FedAvgClient, {2}, {"local-steps": 1, "momentum": 0.5})  # type: ignore[dict-item]
    assert history[0]["replies"] == [0, 1, 3]
    assert "plain SGD in float32, but the config has ['momentum']" in history[0]["failures"][2]
    strategy = fr.FedProx(0.1, **QUIET)
    _, history = run(strategy, fr.FedProxClient, {2}, {"local-steps": 1})
    assert "speaks protocol 4 of flwr-regs, and FedAvg and FedFOR" in history[0]["failures"][2]
