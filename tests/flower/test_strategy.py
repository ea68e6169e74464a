"""The strategy as Flower drives it: downlinks, history, refusals, rounds driven from outside."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import nn

import flwr_regs as fr
from flwr_regs.server.population.population import PopulationError
from flwr_regs.term import Term
from flwr_regs.wire import keys
from flwr_regs.wire.records import from_record, parcel_of, to_record
from tests.conftest import Log, Tampered, close, make_clients, make_model, run, start
from tests.flower.clients.test_plain_clients import plain_app

CONFIG = ConfigRecord({"lr": 0.2, "local-epochs": 1})


def app_of(
    client_class: Callable[..., Any] = fr.FedAvgClient,
    sabotage: Callable[[int, Any], Any] | None = None,
) -> ClientApp:
    """An app of unequal clients; `sabotage(partition_id, client)` may replace or change one."""

    def client_fn(context: Context) -> Any:
        pid = context.node_config["partition-id"]
        data = make_clients(6)[pid]
        client = client_class(make_model(), data, data, device="cpu")
        return sabotage(pid, client) if sabotage else client

    return fr.client_app(client_fn)


def initial() -> ArrayRecord:
    return ArrayRecord(make_model().state_dict())


# Aggregation


def test_fedavg_equals_flowers_own_fedavg() -> None:
    """Flower's strategy and aggregation on the same clients, in float32."""
    model, clients = partial(make_model, torch.float32), make_clients(4, torch.float32)

    grid = fr.InProcessGrid(plain_app(dtype=torch.float32), 4)
    theirs = start(FlowerFedAvg(fraction_evaluate=0.0), grid, 3, model, CONFIG)
    given: dict[str, Any] = {"rounds": 3, "clients": clients, "model": model}
    strategy = fr.FedAvg(fraction_evaluate=0.0)
    ours = run(strategy, fr.FedAvgClient, train={"local-epochs": 1}, **given)
    close(ours, {k: a.numpy() for k, a in theirs.arrays.items()}, 1e-6)


# Downlinks


class ForgetfulGrid(fr.InProcessGrid):
    """A SuperNode restart: partition 1 loses its state before every message; 2's goes stale."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._contexts[1001].state = RecordDict()
        for key, record in self._contexts[1002].state.array_records.items():
            if key.endswith(".model"):
                name = next(iter(record))
                record[name] = Array(record[name].numpy() + 1e-9)
        return super().push_messages(messages)


def test_a_client_that_lost_or_changed_its_model_is_found_and_served_in_the_round() -> None:
    """And a second start meets nothing of the first."""
    settings = {"alpha": 0.5, "seed": 2, "fraction_evaluate": 0.0}
    want = start(fr.FedFOR(**settings), fr.InProcessGrid(app_of(fr.FedFORClient), 4), 5)
    strategy = fr.FedFOR(downlink="delta", **settings)
    grid = ForgetfulGrid(app_of(fr.FedFORClient), 4)
    for _ in range(2):
        close(from_record(start(strategy, grid, 5).arrays), from_record(want.arrays), 0.0)
        assert len(strategy.history) == 5
        last = strategy.history[-1]
        assert (last["replies"], last["failures"]) == ([0, 1, 2, 3], {})
        assert last["bytes_down"][1] > 2.5 * last["bytes_down"][0]  # the step in vain, then both


# History


def test_the_history_is_plain_numbers_and_complete() -> None:
    strategy = fr.FedFOR(alpha=0.1, seed=2, lr_schedule=lambda t: 1 / t)
    result = start(strategy, fr.InProcessGrid(app_of(fr.FedFORClient), 4), 3)
    assert len(repr(result)) < 3000  # sizes, no bytes
    json.dumps(strategy.history, allow_nan=False)
    entry = strategy.history[-1]
    model = sum(a.nbytes for a in from_record(initial()).values())
    assert entry["bytes_down"][0] > 2 * model
    assert model < entry["bytes_up"][0] < 2 * model + 1200
    assert entry["examples_processed"] == 5 * (2 + 3 + 4 + 5)
    assert set(entry["seconds"]) == {"configure", "clients", "aggregate", "evaluate"}
    assert set(entry["evaluate"]["clients"][0]) == {"num-examples", "accuracy", "loss"}
    assert [e["lr"] for e in strategy.history] == pytest.approx([0.2, 0.1, 0.2 / 3])


def test_the_bytes_of_a_round_hold_also_those_of_clients_that_failed_on_the_way() -> None:
    sizes: dict[str, dict[int, int]] = {"down": {}, "up": {}}

    def change(kind: str, pid: int, message: Message, reply: Message) -> Message | str:
        if kind not in (keys.PROBE, "train"):
            return reply
        sent = parcel_of(message.content).nbytes
        sizes["down"][pid] = sizes["down"].get(pid, 0) + sent
        if (kind, pid) in ((keys.PROBE, 1), ("train", 2)):
            return "it stops here"
        sizes["up"][pid] = sizes["up"].get(pid, 0) + parcel_of(reply.content).nbytes
        return reply

    strategy = fr.RFedAvgPlus(lam=0.1, seed=1, fraction_evaluate=0.0)
    start(strategy, Tampered(app_of(fr.RFedAvgPlusClient), 4, change), 1)
    (entry,) = strategy.history
    assert sorted(entry["failures"]) == [1, 2]
    assert {"down": entry["bytes_down"], "up": entry["bytes_up"]} == sizes
    assert entry["bytes_probe_down"][1] == entry["bytes_down"][1]
    assert entry["bytes_probe_up"][2] == entry["bytes_up"][2]


def test_the_seed_is_drawn_and_logged_if_not_given(log: Log) -> None:
    a, b = fr.FedAvg(), fr.FedAvg()
    assert a.seed != b.seed
    a.summary()
    assert log(f"seed {a.seed}")


# What is refused before a client is contacted


class Untouchable(fr.InProcessGrid):
    """Fails if a client is contacted."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise AssertionError("a client was contacted")


STEPS = {"lr": 0.1, "local-epochs": 1}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lr": 0.1, "local-epoch": 1}, "unknown train_config key 'local-epoch'.*'local-epochs'"),
        ({"local-epochs": 1}, "train_config lacks the key 'lr'"),
        ({"lr": -1.0, "local-epochs": 1}, "'lr' must be a positive number, not -1.0"),
        ({"lr": 0.1}, "must set either"),
        ({**STEPS, "local-steps": 1}, "must set either"),
        ({"lr": 0.1, "local-steps": 2.5}, "'local-steps' must be a positive integer"),
        ({**STEPS, "optimizer": "adamw"}, "'optimizer' must be one of SGD.*did you mean 'AdamW'"),
        ({**STEPS, "momentum": 1.0}, "'momentum' must be a number from 0 to below 1, not 1.0"),
        ({**STEPS, "weight-decay": -0.1}, "'weight-decay' must be a number of at least 0"),
        ({**STEPS, "clip-norm": True}, "'clip-norm' must be a positive number, not True"),
        ({**STEPS, "optimizer": "Adam", "momentum": 0.9}, "torch's Adam takes none: .* one of SGD"),
    ],
)
def test_a_wrong_config_is_refused_before_a_client_is_contacted(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(fr.FedAvg(), Untouchable(app_of(), 3), config=config)


@pytest.mark.parametrize(
    ("strategy", "arrays", "message"),
    [
        (fr.FedAvg(wire_dtype="float16"), {"w": np.zeros(2)}, "rounds float32 arrays"),
        (fr.FedAvg(), {"w": np.array([1j])}, "dtype is '<c16', expected"),
        (fr.FedAvg(), {"w": np.array([np.nan])}, "hold NaN"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_it_is_evaluated(
    strategy: Any, arrays: dict[str, np.ndarray], message: str
) -> None:
    asked: list[int] = []
    with pytest.raises(ValueError, match=message):
        strategy.start(
            grid=Untouchable(ClientApp(), 3),
            initial_arrays=ArrayRecord({n: Array(a) for n, a in arrays.items()}),
            train_config=CONFIG,
            evaluate_fn=lambda server_round, arrays: asked.append(server_round),
        )
    assert asked == []


class Early(fr.FedFOR):
    def __init__(self) -> None:
        self.seed = 3
        super().__init__()


def returning(hook: str, value: Any) -> Any:
    strategy = fr.FedAvg()
    setattr(strategy, hook, lambda *_: value)
    return start(strategy, fr.InProcessGrid(app_of(), 3))


ADAM: Any = torch.optim.Adam(make_model().parameters())


def made(kind: Any, **wrong: Any) -> Any:
    return kind(make_model(), make_clients(1)[0], **wrong)


def asked(client_fn: Any) -> fr.InProcessGrid:
    return fr.InProcessGrid(ClientApp(client_fn), 3)


def begun(arrays: Any, **more: Any) -> Any:
    return fr.FedAvg().start(Untouchable(app_of(), 3), arrays, **more)


NO_METRICS = fr.FedAvg(train_metrics_aggr_fn=lambda *_: 1.0)  # type: ignore[arg-type,return-value]
UNSAID: Any = fr.FedAvg(lr_schedule=lambda t: None)  # type: ignore[arg-type,return-value]
NO_RATE = fr.FedAvg(lr_schedule=lambda t: 0.0)
NAN_RATE = fr.FedAvgM(server_lr_schedule=lambda t: float("nan"))
TUPLE = {"train_config": CONFIG, "evaluate_fn": lambda *_: (0.5, {})}
HALF = make_model().bfloat16().state_dict()
MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: fr.FedProx(0.1, fraction_fit=0.5), TypeError, "FedProx takes no .* fraction_train"),
    (lambda: fr.FedProx(0.1, evaluate_fn=print), TypeError, r"here it is start\(evaluate_fn=...\)"),
    (lambda: fr.FedAdam(eta=0.1), TypeError, "FedAdam takes no .* 'eta': here it is server_lr"),
    (lambda: fr.FedProx(0.1, wieghting="uniform"), TypeError, "'wieghting'; did you mean 'weigh"),
    (lambda: fr.FedProx(0.1, _=1), TypeError, "FedProx takes no argument '_'$"),
    (lambda: begun(HALF), TypeError, "0.weight'.* are bfloat16.*float32_arr"),
    (lambda: begun(make_model()), TypeError, r"not a Sequential; give model\.state_dict\(\)"),
    (lambda: begun(initial(), **TUPLE), TypeError, "must return a MetricRecord .*not a tuple"),
    (lambda: begun(initial(), evaluate_fn={}), TypeError, "evaluate_fn must be a function"),
    (lambda: begun(initial(), num_rounds=0), ValueError, "num_rounds must be a whole number of at"),
    (lambda: begun(initial(), num_rounds="3"), ValueError, "num_rounds must be a whole number of"),
    (lambda: fr.FedAvg().initialize_parameters(None), TypeError, "@app.main and strategy.start"),
    (lambda: fr.FedAvgClient("model", []), TypeError, r"must be a torch\.nn\.Module"),  # type: ignore[arg-type]
    (lambda: fr.FedAvgClient(make_model(), [], classifier="x"), ValueError, "'x' is not a layer"),
    (lambda: fr.Target(float("nan")), ValueError, "Target: value must be a number, not nan"),
    (lambda: fr.Target(1.0, mode="up"), ValueError, "mode must be 'max', 'min' or None, not 'up'"),
    (lambda: fr.Target("score", 0.6), TypeError, "metric must be the name of a metric, not 0.6"),  # type: ignore[arg-type]
    (lambda: Early(), AttributeError, r"'seed' is a setting .*super\(\).__init__"),
    (lambda: start(UNSAID, asked(None)), ValueError, r"lr_schedule\(1\) returned None, expected"),
    (lambda: run(NAN_RATE, fr.FedAvgMClient), ValueError, r"server_lr_schedule\(1\) is nan"),
    (lambda: returning("aggregate_train", initial()), TypeError, r"return \(ArrayRecord or None"),
    (lambda: returning("aggregate_evaluate", {"x": "y"}), TypeError, "the metric 'x' is 'y'"),
    (lambda: returning("aggregate_evaluate", (0.5, {})), TypeError, r"a MetricRecord .*not \(0.5"),
    (lambda: fr.Patience(0), ValueError, "Patience: rounds must be a whole number of at"),
    (lambda: fr.Patience(1, min_delta=-1.0), ValueError, "min_delta must be a number of at"),
    (lambda: fr.client_app(3), TypeError, "needs a function"),  # type: ignore[arg-type]
    (lambda: made(fr.FedFORClient, optimiser=None), TypeError, "'optimiser'.*'optimizer'"),
    (lambda: made(fr.FedAvgClient, optimizer=ADAM), TypeError, r"optimizer\(params, .*of Adam"),
    (lambda: made(fr.Clients, batchsize=8), TypeError, "no argument 'batchsize'.*'batch_size'"),
    (lambda: made(fr.Clients).app(fr.FedFOR), TypeError, "as FedFORClient, not the class FedFOR"),
    (lambda: run(NO_METRICS, fr.FedAvgClient), TypeError, "return a MetricRecord, not a float"),
    (lambda: start(NO_RATE, asked(None)), ValueError, r"lr_schedule\(1\) makes the .* rate 0"),
    (
        lambda: start(fr.FedAvg(), asked(lambda _: fr.FedAvgClient(make_model(), []).to_client())),
        PopulationError,
        r"flwr_regs\.client_app, or RegClientApp for a loop of your own",
    ),
]


@pytest.mark.parametrize(("make", "kind", "message"), MISTAKES)
def test_a_mistake_is_named_with_what_was_meant(
    make: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make()


# Rounds that fail


def burning(pid: int, client: Any) -> Any:
    """Make client 1 fail."""

    def bad(parameters: Any, config: Any) -> Any:
        raise OSError("disk on fire")

    if pid == 1:
        client.fit = bad
    return client


def without_data(pid: int, client: Any) -> Any:
    client.eval_data = None
    return client


def freezing(*pids: int) -> Callable[[int, Any], Any]:
    """Return what lets some clients hold a layer's weight."""

    def freeze(pid: int, client: Any) -> Any:
        client.model[0].weight.requires_grad_(pid not in pids)
        return client

    return freeze


class Overflow(Term):
    """Makes a step without bounds."""

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return {"moved": True}, {n: d * np.inf for n, d in delta.items()}


FAILING: list[tuple[Any, Any, str]] = [
    (fr.FedAvg(min_replies=4), app_of(sabotage=burning), "cohort of 3 cannot give min_replies=4"),
    (fr.FedAvg(min_replies=3), app_of(sabotage=burning), "2 usable.*of 3, needed 3.*on fire"),
    (fr.FedAvg(), app_of(sabotage=lambda *_: 1 / 0), r"0 usable.*partitions 0-2\) failed.*divis"),
    (fr.FedFOR(), app_of(fr.FedProxClient), r"FedProxClient \(FedProx\).*strategy runs 'FedFOR'"),
    (fr.FedFOR(), plain_app(), "no method.*FedFORClient"),
    (fr.FedAvg(), app_of(sabotage=without_data), r"could evaluate.*pass eval_data"),
    (fr.FedAvg(), fr.client_app(id), "client_fn must return a NumPyClient or Client, not int"),
    (fr.RegStrategy([Overflow()]), app_of(fr.RegClient), r"diverged.*strategy\.arrays"),
]


@pytest.mark.parametrize(("strategy", "app", "message"), FAILING)
def test_a_failed_round_ends_a_run_and_loses_nothing(strategy: Any, app: Any, message: str) -> None:
    with pytest.raises(fr.RoundFailed, match=message):
        start(strategy, fr.InProcessGrid(app, 3))
    if "evaluate" not in message:
        close(from_record(strategy.arrays), from_record(initial()), 0.0)
        assert strategy.training.model.step is None
        assert not any(strategy.training.model.server.get("identity", {}))
        assert re.search(message, strategy.history[-1]["failed"])
    if "on fire" in message:
        assert "test_strategy.py, line" in strategy.history[-1]["failures"][1]


def test_the_majority_says_what_is_trained_and_half_against_half_the_model_stays() -> None:
    strategy = fr.FedAvg(seed=1, fraction_evaluate=0.0)
    app = app_of(sabotage=lambda *at: freezing(*range(len(strategy.history) + 1))(*at))
    start(strategy, fr.InProcessGrid(app, 4))  # in round 2 it is half, which then decides nothing
    for t, entry in enumerate(strategy.history, 1):
        assert sorted(entry["failures"]) == [*range(t)]
        assert "differ in ['0.weight']" in entry["failures"][0]
    undecided = fr.FedAvg(seed=1)
    start(undecided, fr.InProcessGrid(app_of(sabotage=freezing(0, 1)), 4))
    assert all("equally many each way" in entry["failed"] for entry in undecided.history)
    close(from_record(undecided.arrays), from_record(initial()), 0.0)


class DeafGrid(fr.InProcessGrid):
    """Partition 1 answers another message; 2 is lost, as Flower says it; 3 gets no message.

    The others take their time; with each reply the first one comes again.
    """

    replies_at_once, looks = False, 0
    first: Sequence[Message] = ()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        if messages and messages[0].metadata.message_type == "train":
            ids[3] = None  # type: ignore[call-overload]  # as Flower's grid says
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        (i,) = message_ids
        reply = self._replies[i]
        node = reply.metadata.message_type == "train" and reply.metadata.src_node_id
        if node == 1002:
            reply = Message(Error(5, "node unavailable"), reply_to=reply)
            reply.metadata.__dict__.update(_src_node_id=1, _reply_to_message_id=i)
        elif node == 1001:
            reply.metadata.__dict__["_reply_to_message_id"] = "another"
        else:
            self.looks += bool(node)
            came = list(super().pull_messages([i] if not node or self.looks > 9 else []))
            self.first = self.first or came
            return came and [*came, *self.first]
        return [reply]


def test_silent_and_dead_nodes_are_found_as_cohort_minus_answered(log: Log) -> None:
    """At the end, those that were of no use in any round are named once more."""
    strategy = fr.FedAvg(seed=1, fraction_evaluate=0.0, deadline=60.0)
    start(strategy, DeafGrid(app_of(), 5), 1)
    foreign, lost = "its reply names another message", "error code 5: node unavailable"
    why = {1: foreign, 2: f"no reply ({lost})", 3: "no reply within the deadline of 60 s"}
    assert [(e["replies"], e["failures"]) for e in strategy.history] == [([0, 4], why)]
    (said,) = log("in the whole training, ")
    assert all(f"(partition {p}) gave no usable reply: {text}" in said for p, text in why.items())


def test_one_failed_evaluation_does_not_end_training_but_the_first_does() -> None:
    def change(kind: str, pid: int, message: Message, reply: Message) -> Message | str:
        number = message.content.config_records.get("config", {}).get("server-round")
        return "no disk" if (kind, number) == ("evaluate", 2) else reply

    strategy = fr.FedAvg(seed=1)
    result = start(strategy, Tampered(app_of(), 3, change), 3)
    assert set(result.evaluate_metrics_clientapp) == {1, 3}
    assert set(strategy.history[1]["evaluate"]["failures"]) == {0, 1, 2}


# Rounds that are driven from outside


def test_another_model_is_taken_up_where_the_rounds_are_driven_from_outside() -> None:
    """What clients get is what configure_train was handed, and the last step ends there."""
    strategy = fr.FedFOR(alpha=0.5, weighting="uniform", seed=1, fraction_evaluate=0.0)
    grid, arrays = fr.InProcessGrid(app_of(fr.FedFORClient), 3), initial()
    strategy.prepare(2, train_config=CONFIG)
    for t in (1, 2):
        messages = list(strategy.configure_train(t, arrays, CONFIG, grid))
        records = messages[0].content.array_records
        sent = {name: from_record(record) for name, record in records.items()}
        close(sent["arrays"], from_record(arrays), 0.0)
        new, _ = strategy.aggregate_train(t, grid.pull_messages(grid.push_messages(messages)))
        assert new is not None
        arrays = to_record({n: a + 0.125 for n, a in from_record(new).items()})
    first = from_record(initial())
    want = {n: (first[n] - sent["arrays"][n]) / 0.2 for n in first}
    close(sent["first-order.broadcast"], want, 1e-12)


@pytest.mark.parametrize(
    ("make", "client"),
    [
        (partial(fr.FedFOR, 0.5, "delta", overlap=True, fraction_train=0.5), fr.FedFORClient),
        (partial(fr.RFedAvgPlus, lam=0.5), fr.RFedAvgPlusClient),
    ],
    ids=["sent ahead", "first exchange"],
)
def test_driven_from_outside_is_the_same_to_the_bit(make: Any, client: Any) -> None:
    ours, driven = make(seed=2), make(seed=2)
    start(ours, fr.InProcessGrid(app_of(client), 6), 3)
    grid, arrays = fr.InProcessGrid(app_of(client), 6), initial()
    train, evaluate = driven.prepare(3, train_config=CONFIG)
    driven.summary()
    for t in (1, 2, 3):
        messages = list(driven.configure_train(t, arrays, train, grid))
        arrays, metrics = driven.aggregate_train(t, grid.send_and_receive(messages))
        assert metrics is not None
        messages = list(driven.configure_evaluate(t, arrays, evaluate, grid))
        driven.aggregate_evaluate(t, grid.send_and_receive(messages))
    close(from_record(ours.arrays), from_record(driven.arrays), 0.0)
    for a, b in zip(ours.history, driven.history, strict=True):
        assert {**a, "seconds": None} == {**b, "seconds": None}


def test_another_model_without_a_word_and_replies_without_a_round_are_refused() -> None:
    """So does a wrapper that adds noise, when nothing else gives it away."""
    strategy, grid = fr.FedAvg(seed=1), fr.InProcessGrid(app_of(), 3)
    messages = list(strategy.configure_train(1, initial(), CONFIG, grid))
    replies = list(grid.send_and_receive(messages))
    new, _ = strategy.aggregate_train(1, replies)
    assert new is not None
    for again in (strategy.aggregate_train, strategy.aggregate_evaluate):
        with pytest.raises(RuntimeError, match="without a configure_train or"):
            again(1, replies)
    assert strategy.aggregate_evaluate(1, []) is None
    list(strategy.configure_train(2, ArrayRecord({**new}), CONFIG, grid))  # in other hands
    noisy = to_record({n: a + 0.125 for n, a in from_record(new).items()})
    with pytest.raises(ValueError, match=r"wrapped around this.* a start of your own.*prepare"):
        strategy.configure_train(2, noisy, CONFIG, grid)


class TrainsOnly(fr.FedFOR):
    """A user's own variation, which keeps its method's name: its clients do not evaluate."""

    skips = 0

    def configure_train(self, server_round: int, *args: Any) -> Any:
        return [] if server_round == self.skips else super().configure_train(server_round, *args)

    def configure_evaluate(self, *args: Any) -> Any:
        return []


def test_a_subclass_may_skip_a_phase() -> None:
    """Also training in round 1, in which nothing of an earlier training goes on."""
    strategy = TrainsOnly(alpha=0.1, seed=1)
    grid = fr.InProcessGrid(app_of(fr.FedFORClient), 3)
    for strategy.skips, trained in ((1, [False, True]), (0, [True] * 2), (1, [False, True])):
        start(strategy, grid)
        entries = [("cohort" in e, "evaluate" in e) for e in strategy.history]
        assert entries == [(is_trained, False) for is_trained in trained]
    assert not strategy.history[-1]["failures"]


class Faster(fr.RegStrategy):
    """A user's own variation, whose server does not know the clients' learning rate."""

    def configure_train(self, *args: Any) -> Any:
        messages = list(super().configure_train(*args))
        for message in messages:
            message.content["config"]["lr"] = 0.3
        return messages


def test_a_learning_rate_that_the_server_does_not_know_is_named_once(log: Log) -> None:
    """Of terms that run on the clients alone nothing is said."""
    for of, client in ((fr.FedADC(), fr.FedADCClient), (fr.FedProx(0.1), fr.FedProxClient)):
        app = app_of(partial(fr.RegClient, terms=client.terms))
        start(Faster(of.term.terms, seed=1), fr.InProcessGrid(app, 3))
    (text,) = [line for line in log() if "0.3" in line and "learning rate" in line]
    assert "['fedadc'] may compute on the server with 0.2" in text


class RunsAdam(fr.SCAFFOLD):
    """A user's own variation: its clients run Adam."""

    def configure_train(self, number: int, arrays: Any, config: Any, grid: Any) -> Any:
        return super().configure_train(number, arrays, {**config, "optimizer": "Adam"}, grid)


def test_a_config_that_a_subclass_changes_is_checked_before_a_client_is_asked() -> None:
    strategy = RunsAdam(seed=1)
    with pytest.raises(ValueError, match="Adam may take other steps"):
        start(strategy, fr.InProcessGrid(app_of(fr.SCAFFOLDClient), 3))
    assert strategy.history == []


class SendsItsOwn(fr.FedAvg):
    """A user's own variation: client 0 gets a message that is made anew, and a question beside it."""

    def configure_train(self, *args: Any) -> Any:
        first, *others = super().configure_train(*args)
        node, content = first.metadata.dst_node_id, RecordDict({**first.content})
        return [Message(content, node, "train"), Message(content, node, "query.mine"), *others]


def test_a_reply_counts_to_a_message_that_a_subclass_has_made_anew() -> None:
    strategy = SendsItsOwn(seed=1, fraction_evaluate=0.0)
    start(strategy, fr.InProcessGrid(app_of(), 3))
    assert [(e["failures"], e["replies"]) for e in strategy.history] == [({}, [0, 1, 2])] * 2


class LeavesOut(fr.FedAvg):
    """A user's own variation: the last client of the cohort gets no message."""

    def configure_train(self, *args: Any) -> Any:
        return list(super().configure_train(*args))[:-1]


def test_a_client_that_a_subclass_leaves_out_is_neither_late_nor_counted() -> None:
    strategy = LeavesOut(seed=1, deadline=60.0)
    start(strategy, fr.InProcessGrid(app_of(), 3), 1)
    (entry,) = strategy.history
    assert "sent it no message" in entry["failures"][2]
    assert (entry["bytes_down"][2], "late" in entry) == (0, False)


def test_clients_that_evaluate_alone_leave_the_model_as_it_is() -> None:
    strategy = fr.FedProx(0.1, seed=1, fraction_train=0.0)  # the clients may be of another method
    result = start(strategy, fr.InProcessGrid(app_of(), 3))
    close(from_record(strategy.arrays), from_record(initial()), 0.0)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]


# What users' code sees


def test_what_is_no_classification_has_no_accuracy() -> None:
    data, net = [(torch.ones(3, 4), torch.ones(3, 1))], nn.Linear(4, 1)
    client = fr.FedAvgClient(net, data, data, loss_fn=nn.functional.mse_loss, device="cpu")
    names = json.dumps(list(net.state_dict()))
    _, count, metrics = client.evaluate(client.get_parameters({}), {keys.NAMES_KEY: names})
    assert (count, metrics) == (3, {})
