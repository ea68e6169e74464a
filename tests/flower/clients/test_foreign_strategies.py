"""Flower's own strategies with our clients: refused, so that no run completes without training."""

from functools import partial
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server import strategy as older
from flwr.serverapp import strategy as flowers
from flwr.serverapp.exception import InconsistentMessageReplies

import flwr_regs as fr
from flwr_regs.testing.problem import SerialisingGrid
from tests.conftest import make_clients, make_model, start
from tests.flower.clients.test_own_loop import own_app

WHY = "refused by the client: this client is FedFORClient .*use flwr_regs.FedFOR or RegStrategy"


def client_of(context: Context) -> Any:
    data = make_clients(6)[context.node_config["partition-id"]]
    return fr.FedFORClient(make_model(), data, data)


APPS = {
    "client_app": lambda: fr.client_app(client_of),
    "to_client": lambda: fr.client_app(lambda context: client_of(context).to_client()),
    "own loop": lambda: own_app(fr.FedFORClient, n=6),
}


@pytest.mark.parametrize(
    ("make", "app"),
    [
        *((flowers.FedAvg, app) for app in APPS),
        (flowers.Krum, "client_app"),
        (partial(flowers.QFedAvg, client_learning_rate=0.1), "client_app"),
    ],
)
def test_the_run_ends_in_round_one_and_says_why(make: Any, app: str) -> None:
    why = WHY.replace("FedFORClient", "a loop of FedFORClient") if app == "own loop" else WHY
    with pytest.raises(ValueError, match=why):
        start(make(), SerialisingGrid(APPS[app](), 6))


def test_records_of_other_names_are_refused() -> None:
    strategy = partial(flowers.FedAvg, arrayrecord_key="model")
    with pytest.raises(ValueError, match=r"no ArrayRecord 'arrays', only \['config', 'model'"):
        start(strategy(), SerialisingGrid(APPS["client_app"](), 6))
    for name in ("client_app", "own loop"):  # evaluation alone: Flower's error, our log
        with pytest.raises(InconsistentMessageReplies):
            start(strategy(fraction_train=0.0), SerialisingGrid(APPS[name](), 6))


@pytest.mark.parametrize(("app", "initial"), [("client_app", True), ("ClientApp", False)])
def test_an_older_strategy_is_refused(app: str, initial: bool) -> None:
    arrays = [v.numpy() for v in make_model().state_dict().values()]
    given = ndarrays_to_parameters(arrays) if initial else None
    strategy = older.FedAvg(initial_parameters=given, on_fit_config_fn=lambda t: {"lr": 0.1})
    parts = ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))
    server = ServerApp(server_fn=lambda context: parts)
    why = WHY if app == "ClientApp" else "use ServerApp with @app.main and strategy.start"
    its = (ClientApp if app == "ClientApp" else fr.client_app)(lambda context: client_of(context))
    with pytest.raises(ValueError, match=why):
        server(fr.InProcessGrid(its, 6), Context(1, 1, {}, RecordDict(), {}))
