"""Methods that change the server alone: any client of Flower's works with them, as it is."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from torch import nn

import flwr_regs as fr
from flwr_regs.abilities import Weighs
from flwr_regs.methods.client_step.fedadc import SlowMomentum
from flwr_regs.term import Term
from flwr_regs.testing.problem import SerialisingGrid
from tests import conftest
from tests.conftest import close, descend, make_clients, make_model, run

RATE = 0.2  # the plain clients' own
BARE = (fr.FedAvg, fr.FedAvgM, fr.FedExP, fr.FedVARP, fr.FedAdam, fr.FedYogi, fr.FedAdagrad)
SERVERS: dict[str, Callable[..., Any]] = {
    **{method.__name__: method for method in BARE},
    "FedOpt": partial(fr.FedOpt, "Adam", lr=0.01),
    "SlowMo": partial(fr.SlowMo, 0.5),
    "terms": partial(fr.RegStrategy, [SlowMomentum(0.3)]),
}


def one_epoch(model: nn.Module, data: Any) -> int:
    descend(model, torch.optim.SGD(model.parameters(), lr=RATE), data)
    return sum(len(y) for _, y in data)


class Plain(NumPyClient):
    """A user's own NumPyClient: positional weights, its own loop, nothing of ours."""

    metrics: ClassVar[dict[str, Any]] = {"note": "mine", "local-steps": 7}

    def __init__(self, pid: Any, dtype: torch.dtype) -> None:
        self.model, self.data = make_model(dtype), make_clients(4, dtype)[pid]

    def fit(self, parameters: Any, config: Any) -> Any:
        names = self.model.state_dict().keys()
        state = {n: torch.tensor(a) for n, a in zip(names, parameters, strict=True)}
        self.model.load_state_dict(state)
        count = one_epoch(self.model, self.data)
        return [v.numpy() for v in self.model.state_dict().values()], count, {**self.metrics}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 0.5, 3, {"accuracy": 0.25}


def plain_app(kind: type[Plain] = Plain, dtype: torch.dtype = torch.float64) -> Any:
    return fr.client_app(lambda context: kind(context.node_config["partition-id"], dtype))


def message_app(dtype: torch.dtype = torch.float64) -> fr.RegClientApp:
    """Train and evaluate functions of the Message API, as Flower's quickstarts write them."""
    app = fr.RegClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = make_model(dtype)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        data = make_clients(4, dtype)[context.node_config["partition-id"]]
        metrics = MetricRecord({"num-examples": one_epoch(model, data), "train_loss": 1.0})
        arrays = ArrayRecord(model.state_dict())
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 3, "loss": 0.5, "accuracy": 0.25})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


APPS = {"NumPyClient": plain_app, "functions": message_app}


def start(
    strategy: Any, app: Any, config: Mapping[str, Any] | None = None, dtype: Any = torch.float64
) -> Any:
    grid, model = SerialisingGrid(app, 4), partial(make_model, dtype)
    result = conftest.start(strategy, grid, 3, model, config or {})
    assert not any(e["failures"] for e in strategy.history)
    return {n: a.numpy() for n, a in result.arrays.items()}, result


@pytest.mark.parametrize(("name", "kind"), list(zip(SERVERS, [*APPS] * 5, strict=True)))
def test_plain_clients_train_as_ours_do_without_a_word_in_the_config(name: str, kind: str) -> None:
    make, client = SERVERS[name], getattr(fr, f"{name}Client", fr.FedAvgClient)
    config = {"lr": RATE} if name in ("SlowMo", "terms") else None
    strategy = make(seed=1)
    got, result = start(strategy, APPS[kind](), config)
    want = run(make(seed=1), client, rounds=3, lr=RATE, train={"local-epochs": 1})
    close(got, want, 1e-12)
    assert result.evaluate_metrics_clientapp[3]["accuracy"] == 0.25
    assert ("lr" in strategy.history[0]) == (config is not None)


@pytest.mark.parametrize("kind", APPS)
@pytest.mark.parametrize(
    "settings",
    [
        {"downlink": "delta", "overlap": True, "fraction_train": 0.5},
        {"wire_dtype": "bfloat16"},
        {"weighting": "uniform", "privacy": fr.CentralDP(1.0, 1e-9)},
        {"fraction_evaluate": 0.0, "min_replies": 4},
    ],
    ids=lambda s: next(iter(s)),
)
def test_the_settings_of_a_strategy_hold_for_plain_clients(settings: Any, kind: str) -> None:
    dtype = torch.float32
    model, clients = partial(make_model, dtype), make_clients(4, dtype)
    got, _ = start(fr.FedAvgM(0.5, seed=1, **settings), APPS[kind](dtype=dtype), None, dtype)
    ours = fr.FedAvgM(0.5, seed=1, **{**settings, "fraction_evaluate": 0.0})
    train = {"local-epochs": 1}
    want = run(ours, fr.FedAvgMClient, rounds=3, lr=RATE, train=train, clients=clients, model=model)
    close(got, want, 1e-6)


def test_a_plain_client_and_ours_go_together_and_ours_names_what_it_lacks() -> None:
    def client_fn(context: Context) -> Any:
        pid = int(context.node_config["partition-id"])
        if pid % 2:
            return Plain(pid, torch.float64)
        return fr.FedAdamClient(make_model(), make_clients()[pid], make_clients()[pid])

    app = fr.client_app(client_fn)
    got, _ = start(fr.FedAdam(seed=1), app, {"lr": RATE, "local-epochs": 1})
    want = run(fr.FedAdam(seed=1), fr.FedAdamClient, rounds=3, lr=RATE, train={"local-epochs": 1})
    close(got, want, 1e-12)
    strategy = fr.FedAdam(seed=1, min_replies=3)
    with pytest.raises(fr.RoundFailed, match="lacks the key 'lr', the clients' learning rate"):
        start(strategy, app)
    assert sorted(strategy.history[0]["failures"]) == [0, 2]  # the plain ones trained


class Shrinks(Term):
    """A term of the server alone that does not say whether it reads the learning rate."""

    name: ClassVar[str] = "shrinks"

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return server, {n: 0.5 * d for n, d in delta.items()}


@pytest.mark.parametrize(
    ("strategy", "config", "why"),
    [
        (fr.SlowMo(0.5), {}, r"lacks the key 'lr'.*\['slowmo'\] may read on the server"),
        (fr.RegStrategy([Shrinks()]), {}, r"lacks the key 'lr'.*\['shrinks'\] may read"),
        (fr.FedAvg(lr_schedule=lambda t: 1 / t), {}, "'lr'.*which lr_schedule multiplies"),
        (fr.FedAvg(incomplete="scale"), {"lr": 0.1}, "because incomplete='scale' comp"),
        (fr.FedAvg(drop_inactive=1.0), {}, "because drop_inactive=1.0 compares"),
        (fr.FedFOR(), {}, "lacks the key 'lr', the clients' learning rate$"),
        (fr.FedFOR(), {"lr": 0.1}, "for how long the clients train"),
        (fr.FedAdam(), {"penalty": "l2"}, r"unknown.*for a key of your own, write 'user\.penalty'"),
    ],
)
def test_what_the_server_itself_needs_is_missed_before_a_client_is_asked(
    strategy: Any, config: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        strategy.prepare(2, train_config=config)


class Stops(Plain):
    """Client 0 takes one step of two; all report it, as ours do."""

    def fit(self, parameters: Any, config: Any) -> Any:
        arrays, count, _ = super().fit(parameters, config)
        steps = 1 + (config["regs.partition"] > 0)
        taken = {"local-steps": steps, "planned-steps": 2, "examples-processed": 10 * steps}
        return arrays, count, taken


@pytest.mark.parametrize("incomplete", ["drop", "scale"])
def test_steps_count_where_a_plain_client_reports_them(incomplete: Any) -> None:
    config = {"lr": RATE, "local-steps": 2}
    strategy = fr.FedAvg(seed=1, incomplete=incomplete)
    start(strategy, plain_app(Stops), config)
    assert strategy.history[0]["steps"] == {0: 1, 1: 2, 2: 2, 3: 2}
    assert strategy.history[0]["replies"] == [0, 1, 2, 3][incomplete == "drop" :]
    assert strategy.history[0]["examples_processed"] == 70  # also of one that is dropped
    with pytest.raises(fr.RoundFailed, match=r"reports no steps, which incomplete='.*' needs"):
        start(fr.FedAvg(seed=1, incomplete=incomplete), plain_app(), config)


class PerStep(Term, Weighs):
    name: ClassVar[str] = "per-step"
    reads_lr: ClassVar[bool] = False

    def weigh(self, weights: Any, uploads: Any, ctx: Any) -> Any:
        return {k: p / ctx.replies[k].num_steps for k, p in weights.items()}


def test_a_method_that_reads_steps_refuses_a_client_that_reports_none() -> None:
    start(fr.RegStrategy([PerStep()], seed=1), plain_app(Stops), {"lr": 0.1, "local-steps": 2})
    with pytest.raises(fr.RoundFailed, match="it reports no steps, which the method reads"):
        start(fr.RegStrategy([PerStep()], seed=1), plain_app())
