"""FedBuff: the oracle's steps on any clock; what fails, lies or is interrupted changes nothing else."""

import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord

import flwr_regs as fr
from flwr_regs import FedBuff, InProcessGrid, TooFewReplies
from flwr_regs.testing.problem import app_of, start_weights
from flwr_regs.wire import keys
from flwr_regs.wire.records import from_record
from tests.conftest import Tampered, close, make_clients, make_model, norm_model, start, to_numpy
from tests.flower.clients.test_plain_clients import plain_app
from tests.oracles.server_step.fedbuff import fedbuff

CLIENTS = 5


def uneven(pid: int, turn: int) -> float:
    return [1.0, 2.5, 0.7, 1.9, 3.3][pid] + 0.01 * (turn % 3)


def grid_of(
    client: Any = fr.FedAvgClient, kind: Any = InProcessGrid, model: Any = make_model
) -> Any:
    return kind(app_of(client, make_clients(CLIENTS), model), CLIENTS)


def train(
    strategy: fr.RegStrategy,
    grid: Any = None,
    rounds: int = 6,
    model: Any = make_model,
    **more: Any,
) -> dict[str, np.ndarray]:
    return from_record(start(strategy, grid or grid_of(), rounds, model, **more).arrays)


def told(strategy: fr.RegStrategy, key: str) -> list[Any]:
    return [entry[key] for entry in strategy.history]


@pytest.mark.parametrize(
    ("buffer", "working", "seconds"),
    [
        pytest.param(2, 3, uneven, id="stale"),
        pytest.param(6, 2, uneven, id="a-client-twice-in-a-buffer"),
        pytest.param(4, 5, lambda k, turn: 2.0, id="at-one-instant"),
        pytest.param(3, 4, lambda k, turn: 1.0 + k % 2, id="some-at-one-instant"),
        pytest.param(3, 1, uneven, id="one-at-a-time"),
    ],
)
def test_it_equals_the_oracle_on_any_clock(buffer: int, working: int, seconds: Any) -> None:
    strategy = FedBuff(buffer, working, 0.5, seconds, seed=3, lr_schedule=lambda t: 1 / t)
    got = train(strategy)
    staleness: list[list[int]] = []
    order = [pid for began in told(strategy, "began") for pid in began]
    plan = start_weights(), to_numpy(make_clients(CLIENTS)), 6, lambda t: 0.2 / t
    how: dict[str, Any] = {"buffer": buffer, "working": working, "seconds": seconds}
    models = fedbuff(*plan, **how, order=order, server_lr=0.5, staleness=staleness)
    close(got, models[-1], 1e-12)
    assert told(strategy, "staleness") == staleness
    assert all("clients" in seconds for seconds in told(strategy, "seconds"))
    assert max(map(max, staleness)) > 0 or working == 1


class Halves(torch.nn.Linear):
    """A layer whose buffers follow, in each step, from what they were before."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("level", torch.zeros((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.level = self.level / 2 + 1
            self.steps = self.steps + 10
        return super().forward(x.float())


def test_each_of_a_clients_updates_in_one_buffer_counts_with_its_buffers_and_its_loss() -> None:
    told_loss: dict[int, list[float]] = {}

    def note(kind: str, pid: int, message: Message, reply: Message) -> Message:
        if kind == "train":
            loss: Any = reply.content.metric_records["metrics"]["train-loss"]
            told_loss.setdefault(pid, []).append(loss)
        return reply

    strategy = FedBuff(4, 2, seconds=uneven, seed=3, fraction_evaluate=0.0, min_replies=4)
    grid = Tampered(app_of(fr.FedAvgClient, make_clients(3), Halves), 3, note)
    ended = from_record(start(strategy, grid, 8, Halves).arrays)
    levels = [0.0]
    for entry in strategy.history:
        pairs = [*zip(entry["arrived"], entry["staleness"], strict=True)]
        level = [2 + (levels[-1 - tau] - 2) / 2 ** (2 + pid) for pid, tau in pairs]
        weights = [2 + pid for pid, _ in pairs]  # by examples
        mean = np.average([told_loss[pid].pop(0) for pid, _ in pairs], weights=weights)
        assert entry["train_metrics"]["train-loss"] == pytest.approx(mean, abs=1e-12)
        levels.append(np.mean(level))
    assert any(len({*ids}) < len(ids) for ids in told(strategy, "arrived"))
    assert ended["level"] == pytest.approx(levels[-1], abs=1e-9)
    assert 10 * 8 * 2 <= ended["steps"] <= 10 * 8 * 4


@pytest.mark.parametrize("weighting", ["uniform", "num-examples"])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_a_buffer_of_one_cohort_and_equal_durations_are_fedavg_to_the_bit(
    weighting: str, share: float
) -> None:
    settings: dict[str, Any] = {"weighting": weighting, "fraction_train": share, "seed": 5}
    x, y = torch.randn(CLIENTS, 23, 4), torch.randint(0, 3, (CLIENTS, 23))
    data = [(x[k, : 9 + 3 * k], y[k, : 9 + 3 * k]) for k in range(CLIENTS)]

    def trained(strategy: fr.RegStrategy) -> dict[str, np.ndarray]:
        model = make_model(torch.float32)
        clients = fr.Clients(model, data, data, batch_size=4)  # which shuffle
        return train(strategy, InProcessGrid(clients), 3, lambda: model)

    buffered = FedBuff(int(CLIENTS * share), seconds=1.0, **settings)
    close(trained(buffered), trained(fr.FedAvg(**settings)), 0.0)
    assert told(buffered, "clock") == [1.0, 2.0, 3.0]


def test_a_seed_is_a_run_and_a_stack_gives_the_same_up_to_rounding() -> None:
    whole = [map(torch.cat, zip(*batches, strict=True)) for batches in make_clients()]
    model, data = make_model(), [torch.utils.data.TensorDataset(*parts) for parts in whole]

    def trained(seed: int, kind: Any = InProcessGrid) -> dict[str, np.ndarray]:
        grid = kind(fr.Clients(model, data, data, batch_size=5))
        strategy = FedBuff(3, seed=seed, terms=[fr.FirstOrder(0.1)], keep_best="accuracy")
        got = train(strategy, grid)
        assert strategy.method_name == "FedFOR"
        assert {0, 1, 2, 3} == {p for e in told(strategy, "evaluate") for p in e["clients"]}
        return got

    first = trained(1)
    close(trained(1), first, 0.0)
    close(trained(1, fr.StackedGrid), first, 1e-9)
    assert any(np.any(a != first[n]) for n, a in trained(2).items())


class Stop(BaseException):
    """The run ends here."""


@pytest.mark.parametrize(
    ("terms", "client", "model", "seconds"),
    [
        ([], fr.FedAvgClient, make_model, uneven),
        ([], fr.FedAvgClient, make_model, 1.0),  # some that end at one instant are left over
        ([fr.LocalBatchNorm()], fr.FedBNClient, norm_model, uneven),
    ],
    ids=["FedAvg", "at-one-instant", "FedBN"],
)
def test_a_resumed_run_goes_on_with_the_clients_that_were_at_work(
    terms: Any, client: Any, model: Any, seconds: Any, tmp_path: Path
) -> None:
    def build(**more: Any) -> FedBuff:
        settings: dict[str, Any] = {"checkpoint_dir": tmp_path, "seed": 2, **more}
        return FedBuff(2, 4, seconds=seconds, terms=terms, **settings)

    whole = build(checkpoint_dir=None)
    expected = train(whole, grid_of(client, model=model), model=model)

    def stop(entry: dict[str, Any]) -> None:
        if entry["round"] == 3:
            raise Stop

    with pytest.raises(Stop):
        train(build(on_round=stop), grid_of(client, model=model), model=model)
    resumed = build()
    got = train(resumed, grid_of(client, model=model), model=model, resume_from=tmp_path)
    close(got, expected, 0.0)
    for key in ("began", "arrived", "staleness", "at_work", "clock", "evaluate_metrics"):
        assert told(resumed, key) == told(whole, key)
    assert not any(told(whole, "lost_private"))  # a reply is noted under the round of its message


# Clients that fail


def failing(*pids: int, how: Callable[[Any], Any]) -> Any:
    """FedAvg's clients, of which some return what `how` makes of their reply, or raise what it raises."""

    def make(model: Any, train_data: Any, eval_data: Any, **settings: Any) -> Any:
        momentum = {"optimizer": partial(torch.optim.SGD, momentum=0.5), "keep_optimizer": True}
        client = fr.FedAvgClient(model, train_data, eval_data, **momentum, **settings)
        pid = len(train_data) - 2  # client k has 2 + k batches
        fit = client.fit
        if pid in pids:
            client.fit = lambda *a: how(fit(*a))  # type: ignore[method-assign]
        return client

    return make


def crash(reply: Any) -> Any:
    raise RuntimeError("out of memory")


def newer(kind: str, pid: int, message: Message, reply: Message) -> Message:
    """Clients 0 and 2 say that they began from a newer model than they were given."""
    if kind == "train" and pid in (0, 2):
        reply.content["config"]["server-round"] += 1
    return reply


@pytest.mark.parametrize(
    ("grid", "why"),
    [
        (lambda: grid_of(failing(0, 2, how=crash)), "out of memory"),
        (lambda: grid_of(failing(0, 2, how=lambda r: ([a * np.nan for a in r[0]], *r[1:]))), "NaN"),
        (lambda: grid_of(kind=partial(Tampered, change=newer)), "belongs to round"),
    ],
    ids=["crash", "not-finite", "another-version"],
)
def test_who_fails_is_named_and_fills_no_place_of_the_buffer(grid: Any, why: str) -> None:
    strategy = FedBuff(3, seconds=uneven, seed=1, fraction_evaluate=0.0)
    train(strategy, grid())
    for entry in strategy.history:
        assert len(entry["arrived"]) == 3
        assert not {0, 2} & set(entry["arrived"])
        assert all(why in said for said in entry["failures"].values())
    assert {p for entry in strategy.history for p in entry["failures"]} == {0, 2}
    assert not any(strategy.training.remembered.used.get(p) for p in (0, 2))


def far(r: Any) -> Any:
    return [a + 1e6 for a in r[0]], *r[1:]


def still(r: Any) -> Any:
    """It says that it trains fewer parameters."""
    return *r[:2], {**r[2], keys.NOT_TRAINED_KEY: ["0.bias"]}


@pytest.mark.parametrize(
    ("buffer", "how", "what"), [(1, far, "update"), (3, far, "update"), (3, still, "differ")]
)
def test_another_reply_takes_the_place_of_one_that_is_left_out_of_the_step(
    buffer: int, how: Callable[[Any], Any], what: str
) -> None:
    turns = iter(range(99))
    odd = failing(0, how=lambda r: how(r) if next(turns) > 2 else r)
    strategy = FedBuff(buffer, seconds=uneven, seed=1)
    train(strategy, grid_of(odd), rounds=20)
    for entry in strategy.history:
        assert len([p for p in entry["arrived"] if p not in entry["failures"]]) == buffer
        assert all(what in why for why in entry["failures"].values())
    assert {p for entry in strategy.history for p in entry["failures"]} == {0}


def test_a_second_training_without_a_step_takes_nothing_from_the_first() -> None:
    turns = iter([2, 0])
    idle = failing(0, how=lambda r: (*r[:2], {**r[2], "local-steps": next(turns)}))
    strategies = [FedBuff(2, seconds=uneven, seed=1), fr.FedAvg(weighting="uniform", seed=1)]
    grids = [InProcessGrid(app_of(kind, make_clients(2)), 2) for kind in (idle, failing(how=crash))]
    got, expected = [train(*pair, rounds=1) for pair in zip(strategies, grids, strict=True)]
    close(got, expected, 1e-12)
    assert strategies[0].history[0]["failures"].keys() == {0}


def test_if_nobody_is_left_the_round_fails_and_the_model_stays() -> None:
    strategy = FedBuff(3, seed=1, retries=1)
    with pytest.raises(TooFewReplies, match="of FedBuff: 0 usable replies for a buffer of 3"):
        train(strategy, grid_of(failing(*range(CLIENTS), how=crash)))
    assert len(strategy.history[-1]["attempts"]) == 1
    close(from_record(strategy.arrays), start_weights(), 0.0)


def test_of_two_clients_that_disagree_the_run_goes_on() -> None:
    strategy = FedBuff(2, seconds=1.0, seed=1)
    train(strategy, InProcessGrid(app_of(failing(0, how=still), make_clients(2)), 2), rounds=2)
    assert all("equally many each way" in entry["failed"] for entry in strategy.history)


class Slowly(InProcessGrid):
    """As nodes elsewhere: a reply comes at the second look, client 3's never; 4's message is not sent."""

    replies_at_once = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.looks: dict[str, int] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        training = [m.metadata.message_type == "train" for m in sent]
        nodes = [m.metadata.dst_node_id for m in sent]
        ids = super().push_messages(sent)
        lost = [node == 1004 and trains for node, trains in zip(nodes, training, strict=True)]
        return [None if gone else i for i, gone in zip(ids, lost, strict=True)]  # type: ignore[misc]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = []
        for i in message_ids:
            self.looks[i] = self.looks.get(i, 0) + 1
            reply = self._replies[i]
            trains = reply.metadata.message_type == "train"
            if self.looks[i] > 1 and not (trains and reply.metadata.src_node_id == 1003):
                ready.append(i)
        return super().pull_messages(ready)


def test_elsewhere_clients_take_their_own_time_and_only_idle_ones_evaluate() -> None:
    def ended(history: Any) -> bool:
        return len(history) >= 12 and any(3 in entry["failures"] for entry in history)

    strategy = FedBuff(2, 4, seed=1, deadline=0.4, stop_when=ended)
    train(strategy, grid_of(kind=Slowly), rounds=500)
    failures = {p: why for entry in strategy.history for p, why in entry["failures"].items()}
    assert "no reply" in failures.pop(4)
    assert "within the deadline of 0.4 s" in failures.pop(3)
    assert not failures
    assert max(max(staleness) for staleness in told(strategy, "staleness")) > 0
    for entry in strategy.history:
        assert "clock" not in entry
        assert not set(entry["at_work"]) & set(entry["evaluate"]["clients"])


class Elsewhere(InProcessGrid):
    """Nodes that take their own time, of which the first are there."""

    replies_at_once = False
    here = CLIENTS

    def get_node_ids(self) -> list[int]:
        return list(super().get_node_ids())[: self.here]


def test_clients_that_were_at_work_and_have_left_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would end the wait for them."""
    settings: dict[str, Any] = {"checkpoint_dir": tmp_path, "seed": 1, "wait_timeout": 0.0}
    before, resumed = FedBuff(2, 5, **settings), FedBuff(2, 5, **settings)
    train(before, grid_of(kind=Elsewhere), rounds=1)
    left = set(before.history[0]["at_work"]) - {0, 1}
    assert left
    monkeypatch.setattr(Elsewhere, "here", 2)
    train(resumed, grid_of(kind=Elsewhere), rounds=3, resume_from=tmp_path)
    assert resumed.history[1]["failures"] == dict.fromkeys(left, "it has left")
    assert all({*arrived} <= {0, 1} for arrived in told(resumed, "arrived")[1:])


def test_a_users_own_numpyclient_and_a_robust_aggregator() -> None:
    """Client 0's update is enormous: the median bounds it."""
    strategy = FedBuff(4, 4, seed=1, seconds=1.0, aggregator=fr.CoordinateMedian())
    train(strategy, InProcessGrid(plain_app(), 4), rounds=2)
    strategy = FedBuff(4, 4, seed=1, seconds=1.0, aggregator=fr.CoordinateMedian())
    huge = failing(0, how=lambda reply: ([a + 1e3 for a in reply[0]], *reply[1:]))
    got = train(strategy, grid_of(huge), rounds=2)
    assert max(np.abs(a).max() for a in got.values()) < 10
    assert strategy.history[0]["replies"] == strategy.history[0]["cohort"]


class PerClient(FedBuff):
    def configure_train(self, *given: Any) -> Any:
        for message in super().configure_train(*given):
            message.content["config"]["lr"] = 0.01  # type: ignore[index]
            yield message


def test_a_user_who_changes_messages_is_told_that_there_are_none(log: Any) -> None:
    train(PerClient(2, seed=1), rounds=1)
    assert len(log("your configure_train sees no messages", logging.WARNING)) == 1


# What is refused


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"terms": fr.SCAFFOLD().term.terms}, "'scaffold' (of SCAFFOLD, FedGAMMA, FedLESAMS) adds"),
        ({"terms": fr.FedNova().term.terms}, "weighs the updates of one cohort"),
        ({"terms": fr.RFedAvgPlus(0.1).term.terms}, "asks a cohort before it trains"),
        ({"terms": [fr.SparseTernary(0.1)]}, "codes updates"),
        ({"terms": fr.MOON(1.0).term.terms}, "in `finish`"),
        ({"privacy": fr.CentralDP(1.0, 1.0)}, "a cohort that was drawn at random"),
        ({"cohorts": "class-covering"}, "cohorts='class-covering'"),
        ({"downlink": "delta"}, "models of many rounds"),
        ({"incomplete": "scale"}, "use 'average' or 'drop'"),
        ({"buffer": 0}, "FedBuff: buffer must be a whole number of at least 1"),
        ({"buffer": 2, "min_replies": 3}, "buffer=2 does not go with min_replies=3"),
        ({"seconds": np.ones(2)}, "one of half-normal, exponential, uniform, a number, or a func"),
        ({"seconds": "normal"}, "one of half-normal, exponential, uniform, a number, or a func"),
    ],
)
def test_what_assumes_a_cohort_is_refused_by_name(settings: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        FedBuff(**settings)


def test_durations_must_end() -> None:
    with pytest.raises(ValueError, match=r"seconds\(\d, 0\) must be a positive number, not nan"):
        train(FedBuff(2, seconds=lambda pid, turn: float("nan"), seed=1))


def test_the_share_of_clients_that_evaluate_and_the_servers_own_test() -> None:
    strategy = FedBuff(2, seed=1, fraction_evaluate=0.4)

    def test(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"round": number})

    train(strategy, evaluate_fn=test)
    assert told(strategy, "server_metrics") == [{"round": t} for t in range(1, 7)]
    assert {len(e["clients"]) for e in told(strategy, "evaluate")} == {2}
