"""The strategy base: cohorts, downlinks, aggregation, history, and everything that can go wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import nn

from flwr_regs import (
    CentralDP,
    FedAvg,
    FedAvgClient,
    FedBN,
    FedFOR,
    FedFORClient,
    FedProx,
    FedProxClient,
    InProcessGrid,
    RegClient,
    RegStrategy,
    RFedAvgPlus,
    RFedAvgPlusClient,
    RoundFailed,
    client_app,
)
from flwr_regs.flower.grids.contexts import Contexts
from flwr_regs.server.population.population import PopulationError
from flwr_regs.term import Term
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel, Record
from flwr_regs.wire.records import Writer, from_record, parcel_of, to_record
from tests.conftest import close, make_clients, make_model, run

CONFIG = ConfigRecord({"lr": 0.2, "local-epochs": 1})


def app_of(
    client_class: Callable[..., Any] = FedAvgClient,
    model: Callable[[], nn.Module] = make_model,
    sabotage: Callable[[int, Any], Any] | None = None,
) -> ClientApp:
    """An app of unequal clients; `sabotage(partition_id, client)` may replace or change one."""

    def client_fn(context: Context) -> Any:
        pid = context.node_config["partition-id"]
        data = make_clients(6)[pid]
        client = client_class(model(), data, data, device="cpu")
        return sabotage(pid, client) if sabotage else client

    return client_app(client_fn)


def start(strategy: Any, grid: Any, rounds: int = 2, config: Any = CONFIG) -> Any:
    arrays = ArrayRecord(make_model().state_dict())
    return strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, train_config=config)


# Cohorts


def cohorts(strategy: Any, n: int = 6, rounds: int = 5, **kwargs: Any) -> list[list[int]]:
    client = {"FedAvg": FedAvgClient, "FedProx": FedProxClient, "FedFOR": FedFORClient}
    run(
        strategy,
        client[strategy.method_name],
        rounds=rounds,
        clients=make_clients(n),
        **kwargs,
    )
    return [entry["cohort"] for entry in strategy.history]


def test_every_method_sees_the_same_cohorts_and_another_seed_others() -> None:
    half = {"fraction_train": 0.5, "fraction_evaluate": 0.0, "min_train_nodes": 1}
    want = cohorts(FedAvg(seed=4, **half))
    assert all(len(c) == 3 for c in want)
    assert cohorts(FedProx(mu=0.1, seed=4, **half)) == want
    assert cohorts(FedFOR(alpha=0.1, seed=4, **half)) == want
    assert cohorts(FedAvg(seed=5, **half)) != want


class RenumberedGrid(InProcessGrid):
    """Other node ids, in another order: as in every new Flower run."""

    def __init__(self, app: ClientApp, n: int) -> None:
        super().__init__(app, n)
        ids = np.random.default_rng(n).permutation(10**6)[:n].tolist()
        self._contexts = Contexts(ids, {})


def test_node_ids_do_not_matter() -> None:
    strategies = [FedAvg(seed=4, fraction_train=0.5, min_train_nodes=1) for _ in range(2)]
    a = start(strategies[0], InProcessGrid(app_of(), 6), 4)
    b = start(strategies[1], RenumberedGrid(app_of(), 6), 4)
    close(*({k: v.numpy() for k, v in r.arrays.items()} for r in (a, b)), 0.0)


class LeavingGrid(InProcessGrid):
    """The node of partition `gone` leaves after round 2."""

    gone = 2
    trained = 0

    def get_node_ids(self) -> Iterable[int]:
        return [n for n in self._contexts if self.trained < 2 or n != 1000 + self.gone]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.trained += any(m.metadata.message_type == "train" for m in messages)
        return super().push_messages(messages)


def test_a_client_that_leaves_replaces_only_itself() -> None:
    settings = {"fraction_train": 0.5, "min_train_nodes": 3, "fraction_evaluate": 0.0}
    whole, less = FedAvg(seed=4, **settings), FedAvg(seed=4, **settings)
    start(whole, InProcessGrid(app_of(), 6), 8)
    start(less, LeavingGrid(app_of(), 6), 8)
    for a, b in zip(whole.history[2:], less.history[2:], strict=True):
        assert 2 not in b["cohort"]
        assert set(a["cohort"]) - {2} <= set(b["cohort"])
        assert len(b["cohort"]) == 3


def test_an_app_without_client_app_is_told_so() -> None:
    plain = ClientApp(lambda c: FedAvgClient(make_model(), make_clients()[0]).to_client())
    with pytest.raises(PopulationError, match=r"flwr_regs\.client_app"):
        start(FedAvg(), InProcessGrid(plain, 3))


# Aggregation


def test_fedavg_equals_flowers_own_fedavg() -> None:
    """Flower's strategy and aggregation on the same clients, in float32."""
    model = partial(make_model, torch.float32)
    clients = make_clients(4, torch.float32)

    def plain_fit(context: Context) -> Any:
        return Plain(model(), clients[context.node_config["partition-id"]])

    grid = InProcessGrid(client_app(plain_fit), 4)
    arrays = ArrayRecord(model().state_dict())
    kwargs = {"grid": grid, "initial_arrays": arrays, "num_rounds": 3, "train_config": CONFIG}
    theirs = FlowerFedAvg(fraction_evaluate=0.0).start(**kwargs)
    ours = run(
        FedAvg(fraction_evaluate=0.0),
        FedAvgClient,
        rounds=3,
        clients=clients,
        model=model,
        train={"local-epochs": 1},
    )
    close(ours, {k: a.numpy() for k, a in theirs.arrays.items()}, 1e-6)


class Plain(NumPyClient):
    """A user's own NumPyClient: positional weights, its own loop, nothing of ours."""

    def __init__(self, model: nn.Module, data: Any) -> None:
        self.model, self.data = model, data

    def fit(self, parameters: Any, config: Any) -> Any:
        names = self.model.state_dict().keys()
        state = {n: torch.tensor(a) for n, a in zip(names, parameters, strict=True)}
        self.model.load_state_dict(state)
        opt = torch.optim.SGD(self.model.parameters(), lr=config["lr"])
        for x, y in self.data:
            opt.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            opt.step()
        count = sum(len(y) for _, y in self.data)
        return [v.numpy() for v in self.model.state_dict().values()], count, {"note": "mine"}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 0.5, 3, {"accuracy": 0.25}


def test_a_plain_client_and_ours_agree_on_what_is_not_trained() -> None:
    clients = make_clients(4, torch.float32)
    model = partial(make_model, torch.float32, batch_norm=True)

    def app(kinds: list[Any]) -> Any:
        def client_fn(context: Context) -> Any:
            pid = context.node_config["partition-id"]
            return kinds[int(pid)](model(), clients[pid])

        return client_app(client_fn)

    def trained(kinds: list[Any]) -> Any:
        strategy = FedAvg(seed=1, fraction_evaluate=0.0, wire_dtype="bfloat16")
        arrays = strategy.start(
            grid=InProcessGrid(app(kinds), 4),
            initial_arrays=ArrayRecord(model().state_dict()),
            num_rounds=2,
            train_config=CONFIG,
        ).arrays
        assert not any(r["failures"] for r in strategy.history)
        return {n: a.numpy() for n, a in arrays.items()}

    want = trained([FedAvgClient] * 4)
    close(trained([Plain, FedAvgClient, Plain, FedAvgClient]), want, 1e-12)
    close(trained([Plain] * 4), want, 1e-12)


def test_a_plain_client_cannot_pass_for_another_method() -> None:
    def client_fn(context: Context) -> Any:
        return Plain(make_model(), make_clients()[0])

    with pytest.raises(RoundFailed, match=r"names no method.*FedFORClient"):
        start(FedFOR(alpha=0.1), InProcessGrid(client_app(client_fn), 3))


def test_a_model_that_cannot_be_trained_is_refused_before_it_is_evaluated() -> None:
    asked: list[int] = []
    cases: list[tuple[Any, dict[str, np.ndarray], str]] = [
        (FedBN(), {"w": np.zeros(2)}, "FedBN found no BatchNorm layer"),
        (FedAvg(), {}, "initial_arrays is empty"),
        (FedAvg(wire_dtype="float16"), {"w": np.zeros(2)}, "rounds float32 arrays"),
        (
            FedAvg(weighting="uniform", privacy=CentralDP(1.0, 1.0)),
            {"a.running_var": np.ones(2)},
            "use GroupNorm",
        ),
    ]
    for strategy, arrays, message in cases:
        with pytest.raises(ValueError, match=message):
            strategy.start(
                grid=InProcessGrid(ClientApp(), 3),
                initial_arrays=ArrayRecord({n: Array(a) for n, a in arrays.items()}),
                train_config=CONFIG,
                evaluate_fn=lambda server_round, arrays: asked.append(server_round),
            )
    assert asked == []


def test_integer_and_boolean_buffers_keep_their_dtype() -> None:
    def model() -> nn.Module:
        m = make_model(torch.float32, batch_norm=True)
        m.register_buffer("flag", torch.tensor([True, False]))
        return m

    got = run(FedAvg(seed=1), FedAvgClient, clients=make_clients(4, torch.float32), model=model)
    assert got["1.num_batches_tracked"].dtype == np.int64
    # 4 rounds of 2 epochs over 2, 3, 4, 5 batches; means rounded each round: 2·(4+9+16+25)/14 ≈ 8
    assert got["1.num_batches_tracked"] == 32
    assert got["flag"].tolist() == [True, False]
    assert got["0.weight"].dtype == np.float32


# Downlinks


def test_the_delta_downlink_trains_to_the_same_bits_for_half_the_bytes() -> None:
    dtype = torch.float32

    def model() -> nn.Module:
        m = make_model(dtype, batch_norm=True)
        m.register_buffer("flag", torch.tensor([True, False]))
        wide = nn.Linear(100, 100, dtype=dtype)  # so that arrays, not names, weigh
        nn.init.constant_(wide.weight, 0.25)
        nn.init.zeros_(wide.bias)
        m.add_module("wide", wide)
        return m

    kwargs: dict[str, Any] = {"clients": make_clients(4, dtype), "rounds": 5}
    by_name = {}
    for downlink in ("model", "delta"):
        strategy = FedFOR(alpha=0.5, downlink=downlink, seed=2, fraction_evaluate=0.0)
        by_name[downlink] = (
            run(strategy, FedFORClient, model=partial(_skipping_wide, model), **kwargs),
            strategy.history,
        )
    close(by_name["model"][0], by_name["delta"][0], 0.0)
    one_model = by_name["model"][1][0]["bytes_down"][0]  # round 1 sends w_1 alone
    assert by_name["delta"][1][-1]["bytes_down"][0] < 1.02 * one_model
    assert by_name["model"][1][-1]["bytes_down"][0] > 1.9 * one_model


def _skipping_wide(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name, layer in self.body.named_children():
                x = x if name == "wide" else layer(x)
            return x

    return Net()


def test_a_client_that_missed_a_round_gets_the_full_pair() -> None:
    settings = {"alpha": 0.5, "seed": 2, "fraction_train": 0.5, "fraction_evaluate": 0.0}
    both = {}
    for downlink in ("model", "delta"):
        strategy = FedFOR(downlink=downlink, min_train_nodes=1, **settings)
        both[downlink] = run(strategy, FedFORClient, rounds=8, clients=make_clients(6))
    close(both["model"], both["delta"], 0.0)
    full_pair: dict[bool, set[bool]] = {}
    one_model = max(strategy.history[0]["bytes_down"].values())
    for before, entry in zip(strategy.history[1:], strategy.history[2:], strict=False):
        for pid in entry["cohort"]:
            twice = entry["bytes_down"][pid] > 1.4 * one_model
            full_pair.setdefault(pid in before["cohort"], set()).add(twice)
    assert full_pair == {True: {False}, False: {True}}


class ForgetfulGrid(InProcessGrid):
    """A SuperNode restart: partition 1 loses its state before every message; 2's goes stale."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._contexts[1001].state = RecordDict()
        for key, record in self._contexts[1002].state.array_records.items():
            if key.endswith(".model"):
                name = next(iter(record))
                record[name] = Array(record[name].numpy() + 1e-9)
        return super().push_messages(messages)


def test_a_client_that_lost_or_changed_its_model_is_found_and_served_in_the_round() -> None:
    settings = {"alpha": 0.5, "seed": 2, "fraction_evaluate": 0.0}
    want = FedFOR(downlink="model", **settings)
    got = FedFOR(downlink="delta", **settings)
    a = start(want, InProcessGrid(app_of(FedFORClient), 4), 5)
    b = start(got, ForgetfulGrid(app_of(FedFORClient), 4), 5)
    close(*({k: v.numpy() for k, v in r.arrays.items()} for r in (a, b)), 0.0)
    last = got.history[-1]
    assert last["replies"] == [0, 1, 2, 3]
    assert last["failures"] == {}
    assert last["bytes_down"][1] > 2.5 * last["bytes_down"][0]  # the step in vain, then the pair


def test_a_second_start_meets_nothing_of_the_first() -> None:
    grid = InProcessGrid(app_of(FedFORClient), 4)
    strategy = FedFOR(alpha=0.5, downlink="delta", seed=2)
    results = [start(strategy, grid, 3) for _ in range(2)]
    close(*({k: v.numpy() for k, v in r.arrays.items()} for r in results), 0.0)
    assert len(strategy.history) == 3


# History


def test_the_history_is_plain_numbers_and_complete() -> None:
    strategy = FedFOR(alpha=0.1, seed=2)
    start(strategy, InProcessGrid(app_of(FedFORClient), 4), 3)
    json.dumps(strategy.history, allow_nan=False)
    entry = strategy.history[-1]
    model = sum(v.nbytes for v in (a.numpy() for a in _arrays().values()))
    assert entry["bytes_down"][0] > 2 * model
    assert model < entry["bytes_up"][0] < 2 * model + 1200
    assert entry["examples_processed"] == 5 * (2 + 3 + 4 + 5)
    assert set(entry["seconds"]) == {"configure", "clients", "aggregate", "evaluate"}
    assert set(entry["evaluate"]["clients"][0]) == {"num-examples", "accuracy", "loss"}
    assert strategy.history[0]["lr"] == 0.2


def _arrays() -> ArrayRecord:
    return ArrayRecord(make_model().state_dict())


def test_payload_bytes_are_those_of_the_serialised_message() -> None:
    from flwr.common.serde import recorddict_to_proto

    config = {"a": 1.0, "b": ["x", "y"], "c": b"123"}
    arrays = {
        "w": np.ones((3, 4), np.float32),
        "n": np.asarray(7),
        "e": np.zeros((0, 2)),
        "b": np.eye(2).T,
    }
    parcel = Parcel({"arrays": Record(arrays)}, config)
    content = Writer().content_of(parcel)
    size = recorddict_to_proto(content).ByteSize()
    assert 0.75 * size < parcel.nbytes < size
    assert parcel_of(content).nbytes == parcel.nbytes  # counted beforehand, and as it came


# What can go wrong


def test_a_learning_rate_schedule_runs_over_rounds() -> None:
    strategy = FedAvg(seed=1, lr_schedule=lambda t: 1 / t)
    start(strategy, InProcessGrid(app_of(), 3), 3)
    assert [e["lr"] for e in strategy.history] == pytest.approx([0.2, 0.1, 0.2 / 3])
    with pytest.raises(ValueError, match=r"lr_schedule\(1\) makes the learning rate 0"):
        start(FedAvg(lr_schedule=lambda t: 0.0), InProcessGrid(app_of(), 3))


class Untouchable(InProcessGrid):
    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise AssertionError("a client was contacted")


LENGTH = {"lr": 0.1, "local-epochs": 1}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lr": 0.1, "local-epoch": 1}, "unknown train_config key 'local-epoch'.*'local-epochs'"),
        ({"local-epochs": 1}, "train_config lacks the key 'lr'"),
        ({"lr": -1.0, "local-epochs": 1}, "'lr' must be a positive number, not -1.0"),
        ({"lr": 0.1}, "exactly one of the keys"),
        ({"lr": 0.1, "local-epochs": 1, "local-steps": 1}, "exactly one of the keys"),
        ({"lr": 0.1, "local-steps": 2.5}, "'local-steps' must be a positive integer"),
        (
            {**LENGTH, "weight_decay": 0.1},
            "unknown .* key 'weight_decay'.*did you mean 'weight-decay'",
        ),
        ({**LENGTH, "optimizer": "adamw"}, "'optimizer' must be one of SGD.*did you mean 'AdamW'"),
        ({**LENGTH, "optimizer": "SparseAdam"}, "classes of torch.optim.*not 'SparseAdam'"),
        ({**LENGTH, "optimizer": 3}, "'optimizer' must be one of .* not 3"),
        ({**LENGTH, "momentum": 1.0}, "'momentum' must be a number from 0 to below 1, not 1.0"),
        (
            {**LENGTH, "weight-decay": -0.1},
            "'weight-decay' must be a number of at least 0, not -0.1",
        ),
        ({**LENGTH, "clip-norm": 0.0}, "'clip-norm' must be a positive number, not 0.0"),
        ({**LENGTH, "clip-norm": True}, "'clip-norm' must be a positive number, not True"),
        (
            {**LENGTH, "optimizer": "Adam", "momentum": 0.9},
            "has the key 'momentum', but torch's Adam takes none: .* one of SGD, RMSprop",
        ),
        ({**LENGTH, "optimizer": "LBFGS", "weight-decay": 0.1}, "torch's LBFGS takes none"),
    ],
)
def test_a_wrong_config_is_refused_before_a_client_is_contacted(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(FedAvg(), Untouchable(app_of(), 3), config=ConfigRecord(config))


def broken(pid: int, client: Any) -> Any:
    """Make client 1 fail."""

    def bad(parameters: Any, config: Any) -> Any:
        raise OSError("disk on fire")

    if pid == 1:
        client.fit = bad
    return client


def test_too_few_usable_replies_end_the_run_and_lose_nothing() -> None:
    strategy = FedAvg(seed=1, min_replies=3)
    app = app_of(sabotage=broken)
    with pytest.raises(RoundFailed, match=r"round 1 of FedAvg: 2 usable.*of 3, needed 3.*on fire"):
        start(strategy, InProcessGrid(app, 3))
    assert "disk on fire (" in strategy.history[-1]["failures"][1]
    assert "test_strategy.py, line" in strategy.history[-1]["failures"][1]
    close(
        {k: a.numpy() for k, a in strategy.arrays.items()},
        {k: a.numpy() for k, a in _arrays().items()},
        0.0,
    )


def test_no_usable_reply_ends_the_run() -> None:
    def always(pid: int, client: Any) -> Any:
        raise RuntimeError("no disk")

    with pytest.raises(RoundFailed, match=r"0 usable.*clients \[0, 1, 2\] failed.*no disk"):
        start(FedAvg(), InProcessGrid(app_of(sabotage=always), 3))


class DeafGrid(InProcessGrid):
    """Partition 1 never answers; Flower reports 2's death as an error from node 1."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        from flwr.app import Error

        kept = []
        for reply in super().pull_messages(message_ids):
            node = reply.metadata.src_node_id
            if node == 1002 and reply.metadata.message_type == "train":
                reply = Message(Error(5, "node unavailable"), reply_to=reply)
                reply.metadata.__dict__["_src_node_id"] = 1
            if node != 1001 or reply.metadata.message_type != "train":
                kept.append(reply)
        return kept


def test_silent_and_dead_nodes_are_found_as_cohort_minus_answered() -> None:
    strategy = FedAvg(seed=1, fraction_evaluate=0.0)
    start(strategy, DeafGrid(app_of(), 4), 1)
    assert strategy.history[0]["replies"] == [0, 3]
    assert set(strategy.history[0]["failures"]) == {1, 2}
    assert "node unavailable" in strategy.history[0]["failures"][2]


def test_the_wrong_client_class_names_both() -> None:
    with pytest.raises(RoundFailed, match=r"FedProxClient \(FedProx\).*strategy runs 'FedFOR'"):
        start(FedFOR(alpha=0.1), InProcessGrid(app_of(FedProxClient), 3))


def test_a_client_cannot_evaluate_without_data() -> None:
    def no_eval(pid: int, client: Any) -> Any:
        client.eval_data = None
        return client

    with pytest.raises(RoundFailed, match=r"could evaluate.*without eval_data"):
        start(FedAvg(), InProcessGrid(app_of(sabotage=no_eval), 3))


def test_client_fn_must_return_a_client() -> None:
    with pytest.raises(RoundFailed, match="client_fn must return a NumPyClient or Client, not int"):
        start(FedAvg(), InProcessGrid(client_app(lambda context: 3), 3))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="needs a function"):
        client_app(3)  # type: ignore[arg-type]


def test_bad_constructor_arguments_of_a_client() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        FedAvgClient("model", [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classifier 'head' is not a layer"):
        FedAvgClient(make_model(), [], classifier="head")


def test_the_seed_is_drawn_and_logged_if_not_given(caplog: pytest.LogCaptureFixture) -> None:
    a, b = FedAvg(), FedAvg()
    assert a.seed != b.seed
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    try:
        a.summary()
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(logging.ERROR)
    assert f"seed {a.seed}" in caplog.text


# What a review found: each of these was once a silent or a fatal fault


def test_another_model_is_taken_up_where_the_rounds_are_driven_from_outside() -> None:
    """What clients get is what configure_train was handed, and the last step ends there."""
    strategy = FedFOR(alpha=0.5, weighting="uniform", seed=1, fraction_evaluate=0.0)
    grid = InProcessGrid(app_of(FedFORClient), 3)
    arrays = _arrays()
    strategy.prepare(2, train_config=CONFIG)
    for t in (1, 2):
        messages = list(strategy.configure_train(t, arrays, CONFIG, grid))
        records = messages[0].content.array_records
        sent = {name: from_record(record) for name, record in records.items()}
        close(sent["arrays"], from_record(arrays), 0.0)
        new, _ = strategy.aggregate_train(t, grid.pull_messages(grid.push_messages(messages)))
        assert new is not None
        arrays = to_record({n: a + 0.125 for n, a in from_record(new).items()})
    first = from_record(_arrays())
    want = {n: (first[n] - sent["arrays"][n]) / 0.2 for n in first}
    close(sent["first-order.broadcast"], want, 1e-12)


def test_driven_from_outside_is_the_same_to_the_bit() -> None:
    """With an exchange before the training and models sent ahead, too."""
    for make, client in (
        (lambda: FedFOR(0.5, "delta", overlap=True, fraction_train=0.5, seed=2), FedFORClient),
        (lambda: RFedAvgPlus(lam=0.5, seed=2), RFedAvgPlusClient),
    ):
        ours, driven = make(), make()
        start(ours, InProcessGrid(app_of(client), 6), 3)
        grid, arrays = InProcessGrid(app_of(client), 6), _arrays()
        train, evaluate = driven.prepare(3, train_config=CONFIG)
        for t in (1, 2, 3):
            messages = list(driven.configure_train(t, arrays, train, grid))
            arrays, metrics = driven.aggregate_train(t, grid.send_and_receive(messages))
            assert metrics is not None
            messages = list(driven.configure_evaluate(t, arrays, evaluate, grid))
            driven.aggregate_evaluate(t, grid.send_and_receive(messages))
        close(from_record(ours.arrays), from_record(driven.arrays), 0.0)
        for a, b in zip(ours.history, driven.history, strict=True):
            same = set(a) - {"seconds"}
            assert {k: a[k] for k in same} == {k: b[k] for k in same}


def test_another_model_without_a_word_is_refused() -> None:
    """So does a wrapper that adds noise, when nothing else gives it away."""
    strategy, grid = FedAvg(seed=1), InProcessGrid(app_of(), 3)
    messages = list(strategy.configure_train(1, _arrays(), CONFIG, grid))
    new, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert new is not None
    list(
        strategy.configure_train(2, ArrayRecord({**new}), CONFIG, grid)
    )  # the same, in other hands
    noisy = to_record({n: a + 0.125 for n, a in from_record(new).items()})
    with pytest.raises(ValueError, match=r"wrapped around this one.*prepare"):
        strategy.configure_train(2, noisy, CONFIG, grid)


def test_replies_without_a_round_are_refused_and_a_skipped_phase_is_not() -> None:
    strategy, grid = FedAvg(seed=1), InProcessGrid(app_of(), 3)
    messages = list(strategy.configure_train(1, _arrays(), CONFIG, grid))
    replies = list(grid.send_and_receive(messages))
    strategy.aggregate_train(1, replies)
    for again in (strategy.aggregate_train, strategy.aggregate_evaluate):
        with pytest.raises(RuntimeError, match="there was no configure_train or"):
            again(1, replies)
    assert strategy.aggregate_evaluate(1, []) is None

    class TrainsOnly(FedAvg):
        def configure_evaluate(self, *args: Any) -> Any:
            return []

    alone = TrainsOnly(seed=1)
    start(alone, InProcessGrid(app_of(), 3))
    assert ["evaluate" in e for e in alone.history] == [False, False]


def test_a_users_mean_of_the_metrics_sees_the_round_it_is_for() -> None:
    seen: list[int] = []

    def mean(records: Any, key: str) -> MetricRecord:
        seen.append(strategy.history[-1]["round"])
        if len(seen) == 2:
            raise KeyError("mine")
        return MetricRecord({"n": len(records)})

    strategy = FedFOR(0.5, "delta", seed=1, train_metrics_aggr_fn=mean, fraction_evaluate=0.0)
    with pytest.raises(KeyError, match="mine"):
        start(strategy, InProcessGrid(app_of(FedFORClient), 3), 3)
    assert seen == [1, 2]
    assert strategy.history[0]["train_metrics"] == {"n": 3}
    assert strategy.history[1]["replies"] == [0, 1, 2]


def test_no_time_limit_and_replies_that_take_their_time() -> None:
    class Slow(InProcessGrid):
        replies_at_once = False
        pulls = 0

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            self.pulls += 1
            return super().pull_messages(list(message_ids)[::-1][: self.pulls % 3])

    strategies = [FedAvg(seed=1, fraction_evaluate=0.0) for _ in range(2)]
    for strategy, grid in zip(strategies, (Slow, InProcessGrid), strict=True):
        strategy.start(
            grid(app_of(), 5), _arrays(), num_rounds=2, timeout=None, train_config=CONFIG
        )
    slow, quick = ({**s.history[0], "seconds": None} for s in strategies)
    assert json.dumps(slow) == json.dumps(quick)  # the order of replies leaves no trace


def test_a_message_that_could_not_be_sent_is_a_client_without_a_reply() -> None:
    """Flower's grid gives None for its id."""

    class Losing(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            ids = list(super().push_messages(messages))
            if messages[0].metadata.message_type == "train":
                ids[1] = None  # type: ignore[call-overload]
            return ids

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            assert None not in message_ids
            return super().pull_messages(message_ids)

    strategy = FedAvg(seed=1, fraction_evaluate=0.0)
    start(strategy, Losing(app_of(), 3))
    assert [e["failures"] for e in strategy.history] == [{1: "no reply in time"}] * 2


def test_a_training_that_drops_clients_must_say_how_long_it_is() -> None:
    strategy = FedAvg(seed=1, drop_inactive=1.0)
    with pytest.raises(ValueError, match="drop_inactive needs the number of rounds"):
        strategy.configure_train(1, _arrays(), CONFIG, InProcessGrid(app_of(), 3))


def test_mods_see_the_model_and_not_the_step() -> None:
    seen = []

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        if message.metadata.message_type == "train":
            seen.append(from_record(message.content.array_records["arrays"]))
        return call_next(message, context)

    def client_fn(context: Context) -> Any:
        return FedFORClient(make_model(), make_clients(6)[context.node_config["partition-id"]])

    strategy = FedFOR(alpha=0.5, downlink="delta", seed=1, fraction_evaluate=0.0)
    start(strategy, InProcessGrid(client_app(client_fn, mods=[spy]), 2), 3)
    assert np.abs(seen[-1]["0.weight"] - seen[0]["0.weight"]).max() < 0.5  # a model, not a step
    assert np.abs(seen[-1]["0.weight"]).max() > 0.2


@pytest.mark.parametrize("pid", [0, 2])
def test_the_majority_says_what_is_trained(pid: int) -> None:
    def freeze(this: int, client: Any) -> Any:
        if this == pid:
            client.model[0].weight.requires_grad_(False)
        return client

    strategy = FedAvg(seed=1, fraction_evaluate=0.0)
    start(strategy, InProcessGrid(app_of(sabotage=freeze), 3), 2)
    for entry in strategy.history:
        assert list(entry["failures"]) == [pid]
        assert "differ in ['0.weight']" in entry["failures"][pid]


def test_half_against_half_is_everybodys_failure() -> None:
    def freeze(pid: int, client: Any) -> Any:
        client.model[0].weight.requires_grad_(pid > 1)
        return client

    with pytest.raises(RoundFailed, match="half against half"):
        start(FedAvg(seed=1), InProcessGrid(app_of(sabotage=freeze), 4))


def test_a_step_that_overflows_ends_the_run_before_it_is_taken() -> None:
    class Overflow(Term):
        def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
            return {"moved": True}, {n: d * np.inf for n, d in delta.items()}

    strategy = RegStrategy([Overflow()], seed=1)
    with pytest.raises(RoundFailed, match=r"round 1 of FedAvg diverged.*strategy\.arrays"):
        run(strategy, RegClient, terms=[Term])
    close(*({k: a.numpy() for k, a in r.items()} for r in (strategy.arrays, _arrays())), 0.0)
    assert strategy.training.model.server == {"identity": {}}
    assert strategy.training.model.step is None


def test_one_failed_evaluation_does_not_end_training_but_the_first_does() -> None:
    def flaky(pid: int, client: Any) -> Any:
        evaluate = client.evaluate

        def sometimes(parameters: Any, config: Any) -> Any:
            if config["server-round"] == 2:
                raise OSError("no disk")
            return evaluate(parameters, config)

        client.evaluate = sometimes
        return client

    strategy = FedAvg(seed=1)
    result = start(strategy, InProcessGrid(app_of(sabotage=flaky), 3), 3)
    assert set(result.evaluate_metrics_clientapp) == {1, 3}
    assert set(strategy.history[1]["evaluate"]["failures"]) == {0, 1, 2}


def test_a_subclass_keeps_its_methods_name() -> None:
    class Mine(FedFOR):
        """A user's own variation."""

    strategy = Mine(alpha=0.1, seed=1)
    run(strategy, FedFORClient)
    assert strategy.history[-1]["failures"] == {}


def test_complex_and_nan_models_are_refused() -> None:
    for bad, message in (
        (1j, "dtype is '<c16', expected"),
        (np.nan, "hold NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            FedAvg().start(
                grid=InProcessGrid(app_of(), 3),
                initial_arrays=ArrayRecord({"w": Array(np.array([bad]))}),
                train_config=CONFIG,
            )


def test_an_infinite_constant_is_no_divergence() -> None:
    def masked() -> nn.Module:
        m = make_model()
        m.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
        return m

    got = run(FedFOR(alpha=0.5, seed=1, downlink="delta"), FedFORClient, model=masked)
    assert got["mask"].tolist() == [0.0, -float("inf")]
    plain = run(FedFOR(alpha=0.5, seed=1), FedFORClient)
    close({n: got[n] for n in plain}, plain, 0.0)


def test_clients_and_rounds_shuffle_differently() -> None:
    """Two clients with the same data, and one client in two rounds."""
    seen: dict[tuple[int, int], tuple[float, ...]] = {}
    data = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4), torch.arange(12) % 3)

    class Spy(FedAvgClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            order: list[float] = []
            self.model[0].register_forward_pre_hook(lambda m, x: order.extend(x[0][:, 0].tolist()))
            answer = super().fit(parameters, config)
            seen[(self.pid, config["server-round"])] = tuple(order)
            return answer

    def client_fn(context: Context) -> Any:
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        client = Spy(make_model(torch.float32), loader, device="cpu")
        client.pid = context.node_config["partition-id"]
        return client

    strategy = FedAvg(seed=1, fraction_evaluate=0.0)
    strategy.start(
        grid=InProcessGrid(client_app(client_fn), 2),
        initial_arrays=ArrayRecord(make_model(torch.float32).state_dict()),
        num_rounds=2,
        train_config=CONFIG,
    )
    assert len(seen) == 4
    assert len(set(seen.values())) == 4


def test_evaluation_is_in_eval_mode_and_weighted_by_examples() -> None:
    model = make_model(batch_norm=True)
    batches = [make_clients()[0][0], tuple(t[:2] for t in make_clients()[1][0])]
    client = FedAvgClient(model, batches, batches, device="cpu")
    reference = make_model(batch_norm=True).eval()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    names = json.dumps(list(model.state_dict()))
    loss, count, metrics = client.evaluate(client.get_parameters({}), {keys.NAMES_KEY: names})
    assert count == 7
    want = nn.functional.cross_entropy(reference(x), y)
    assert loss == pytest.approx(want.item(), abs=1e-12)
    assert metrics["accuracy"] == (reference(x).argmax(1) == y).double().mean().item()


def test_what_is_no_classification_has_no_accuracy() -> None:
    data = [(torch.ones(3, 4), torch.ones(3, 1))]
    net = nn.Linear(4, 1)
    client = FedAvgClient(net, data, data, loss_fn=nn.functional.mse_loss, device="cpu")
    names = json.dumps(list(net.state_dict()))
    _, count, metrics = client.evaluate(client.get_parameters({}), {keys.NAMES_KEY: names})
    assert (count, metrics) == (3, {})


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (
            {"fraction_fit": 0.5},
            "FedProx takes no argument 'fraction_fit', .* now it is fraction_train",
        ),
        ({"evaluate_fn": print}, r"now it is start\(evaluate_fn=...\)"),
        ({"wieghting": "uniform"}, "'wieghting'; did you mean 'weighting'"),
    ],
)
def test_an_unknown_argument_is_named_with_what_was_meant(wrong: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        FedProx(0.1, **wrong)


def test_an_older_server_is_told_what_to_use_instead() -> None:
    with pytest.raises(TypeError, match=r"@app.main and strategy.start .docs/migration.md"):
        FedAvg().initialize_parameters(None)
