"""What is refused by a client: Flower's own strategies, and messages that are not of the protocol."""

from functools import partial
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
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


@pytest.mark.parametrize("app", APPS)
def test_the_run_ends_in_round_one_and_says_why(app: str) -> None:
    why = WHY.replace("FedFORClient", "a loop of FedFORClient") if app == "own loop" else WHY
    with pytest.raises(ValueError, match=why):
        start(flowers.FedAvg(), SerialisingGrid(APPS[app](), 6))


def test_a_mod_that_takes_the_config_away_is_told_the_same() -> None:
    def mod(message: Message, context: Context, call_next: Any) -> Message:
        message.content.pop("config")
        return call_next(message, context)

    with pytest.raises(fr.RoundFailed, match=WHY):
        start(fr.FedFOR(0.1), fr.InProcessGrid(fr.client_app(client_of, [mod]), 6))


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


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("server-round", "a", "'server-round' must be a whole number of .* not 'a'"),
        ("server-round", 1.5, "'server-round' must be a whole number"),
        ("server-round", None, r"the message lacks \['server-round'\]"),
        ("regs.seed", -1, "'regs.seed' must be a whole number"),
        ("regs.seed", None, r"the message lacks \['regs.seed'\]"),
        ("regs.partition", "0", "'regs.partition' must be a whole number"),
        ("regs.previous-lr", "0.1", "'regs.previous-lr' must be a number of at least 0"),
        ("regs.snapshots", 5, "'regs.snapshots' must be one or two rounds, not 5"),
        ("regs.snapshots", ["round-9"], "must be one or two rounds"),
        ("regs.snapshots", [1, 2, 3], "must be one or two rounds"),
        ("regs.downlink", "half", "'regs.downlink' must be one of .*, not 'half'"),
        ("regs.downlink", [1], "'regs.downlink' must be one of"),
        ("regs.downlink", "coded", "'coded' lacks .*'regs.digest', 'regs.prev.*regs.steps'"),
    ],
)
@pytest.mark.parametrize("app", ["client_app", "own loop"])
def test_messages_outside_the_protocol_are_refused_by_name(
    app: str, key: str, value: Any, why: str
) -> None:
    """Also of a right method; the client is as it was."""
    served = APPS[app]()

    def altering(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            config: Any = message.content["config"]
            kept = RecordDict({name: record.copy() for name, record in context.state.items()})
            config.pop(key, None)
            config.update({} if value is None else {key: value})
            reply = served(message, context)
            assert reply.has_error()
            assert context.state == kept
            return reply
        return served(message, context)

    with pytest.raises(RuntimeError, match=why):
        start(fr.FedFOR(alpha=0.1), SerialisingGrid(altering, 6))
