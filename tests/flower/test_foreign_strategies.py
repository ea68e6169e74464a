"""Flower's own strategies with our clients: refused, so that no run completes without training."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server import strategy as older
from flwr.serverapp import strategy as flowers

from flwr_regs import (
    ClientRound,
    FedAvgClient,
    FedFORClient,
    InProcessGrid,
    RegClientApp,
    client_app,
    load_model,
)
from flwr_regs.testing.problem import SerialisingGrid
from tests.conftest import make_clients, make_model
from tests.processes import command, environment

CONFIG = {"lr": 0.1, "local-epochs": 1}
WHY = "refused by the client: this client is FedFORClient .*use flwr_regs.FedFOR or RegStrategy"


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


def client_of(context: Context, kind: Any = FedFORClient) -> Any:
    data = make_clients(6, torch.float32)[context.node_config["partition-id"]]
    return kind(make_model(torch.float32), data, data)


def own_loop() -> RegClientApp:
    app = RegClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        data = make_clients(6, torch.float32)[context.node_config["partition-id"]]
        return ClientRound(message, FedFORClient, make_model(torch.float32), data).reply()

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        load_model(message, FedFORClient, make_model(torch.float32))
        raise AssertionError("there was a model")

    return app


APPS = {
    "client_app": lambda: client_app(client_of),
    "to_client": lambda: client_app(lambda context: client_of(context).to_client()),
    "own loop": own_loop,
}


def start(strategy: Any, app: Any, grid: Any = SerialisingGrid) -> Any:
    return strategy.start(
        grid=grid(app, 6),
        initial_arrays=ArrayRecord(make_model(torch.float32).state_dict()),
        num_rounds=2,
        train_config=ConfigRecord(CONFIG),
    )


@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize(
    "make",
    [
        flowers.FedAvg,
        flowers.FedAdam,
        flowers.FedMedian,
        flowers.Krum,
        partial(flowers.QFedAvg, client_learning_rate=0.1),
    ],
)
def test_the_run_ends_in_round_one_and_says_why(make: Any, app: str) -> None:
    why = WHY.replace("FedFORClient", "a loop of FedFORClient") if app == "own loop" else WHY
    with pytest.raises(ValueError, match=why):
        start(make(), APPS[app]())


def test_our_fedavg_client_is_refused_too() -> None:
    """It could train, but Flower's FedAvg would treat buffers, seeds and budgets in its own way."""
    app = client_app(partial(client_of, kind=FedAvgClient))
    with pytest.raises(ValueError, match=r"FedAvgClient .*use flwr_regs\.FedAvg or"):
        start(flowers.FedAvg(), app)


def test_records_of_other_names_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    strategy = partial(flowers.FedAvg, arrayrecord_key="model")
    with pytest.raises(
        ValueError, match=r"holds no ArrayRecord 'arrays', only \['config', 'model'"
    ):
        start(strategy(), APPS["client_app"]())
    for name in ("client_app", "own loop"):  # evaluation alone: Flower's error, our log
        with pytest.raises(Exception, match="exactly one MetricRecord"):
            start(strategy(fraction_train=0.0), APPS[name]())


@pytest.mark.parametrize(("app", "initial"), [("client_app", True), ("ClientApp", False)])
def test_an_older_strategy_is_refused(app: str, initial: bool) -> None:
    arrays = [v.numpy() for v in make_model(torch.float32).state_dict().values()]
    given = ndarrays_to_parameters(arrays) if initial else None
    strategy = older.FedAvg(initial_parameters=given, on_fit_config_fn=lambda t: dict(CONFIG))
    parts = ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))
    server = ServerApp(server_fn=lambda context: parts)
    why = WHY if app == "ClientApp" else "use ServerApp with @app.main and strategy.start"
    its = (ClientApp if app == "ClientApp" else client_app)(lambda context: client_of(context))
    with pytest.raises(ValueError, match=why):
        server(InProcessGrid(its, 6), Context(1, 1, {}, RecordDict(), {}))


SCRIPT = """
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from flwr_regs import client_app
from tests.flower.test_foreign_strategies import client_of, make_model

server = ServerApp()

@server.main()
def main(grid, context):
    FedAvg().start(
        grid=grid,
        initial_arrays=ArrayRecord(make_model().float().state_dict()),
        train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
    )
    print("COMPLETED")

run_simulation(server, client_app(client_of), 3, backend_config={"client_resources": {"num_cpus": 1}})
"""


@pytest.mark.flower
@pytest.mark.timeout(600)
def test_it_is_refused_in_ray(tmp_path: Path) -> None:
    from tests.conftest import ROOT

    script = tmp_path / "foreign.py"
    script.write_text(SCRIPT)
    env = {**environment(tmp_path), "PYTHONPATH": str(ROOT)}
    run = command(sys.executable, script, env=env, cwd=tmp_path)
    assert run.returncode != 0
    assert "COMPLETED" not in run.stdout
    assert "use flwr_regs.FedFOR or RegStrategy" in run.stderr.splitlines()[-1], run.stderr[-3000:]
