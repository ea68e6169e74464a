"""Rounds that fail in part: further attempts, deadlines, an early end, callbacks. `start` follows them."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord

import flwr_regs as fr
from flwr_regs.flower.loop import line_of
from flwr_regs.flower.writers import numbers
from flwr_regs.wire.records import from_record
from tests.conftest import Log, Tampered, budgeted, close, run, start
from tests.flower.test_strategy import app_of, freezing


class Lossy(fr.InProcessGrid):
    """Clients train, but the replies to some pushes are lost: `loses(push, node)` says which."""

    def __init__(self, app: Any, n: int, loses: Callable[[int, int], bool]) -> None:
        super().__init__(app, n)
        self.loses, self.pushes = loses, 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        training = bool(messages) and messages[0].metadata.message_type == "train"
        self.pushes += training
        ids = list(super().push_messages(messages))
        for i in ids if training else []:
            if self.loses(self.pushes, self._replies[i].metadata.src_node_id):
                del self._replies[i]
        return ids


@pytest.mark.parametrize(
    ("make", "client", "number"),
    [
        (fr.FedAvg, fr.FedAvgClient, 1),
        (lambda **s: fr.FedADC(downlink="delta", **s), fr.FedADCClient, 2),
        (lambda **s: fr.EFL(0.1, density_up=0.3, **s), fr.EFLClient, 2),
        (lambda **s: fr.RFedAvgPlus(lam=0.5, **s), fr.RFedAvgPlusClient, 1),
    ],
    ids=["FedAvg", "FedADC", "EFL", "RFedAvgPlus"],
)
def test_a_second_attempt_with_the_same_cohort_ends_at_the_unbroken_runs_bits(
    make: Callable[..., fr.RegStrategy], client: Any, number: int
) -> None:
    """All clients trained in vain: their state and kept models go back to those before the attempt."""
    settings = {"seed": 3, "fraction_train": 0.5, "fraction_evaluate": 0.5, "min_replies": 3}
    unbroken = make(**settings)
    start(unbroken, fr.InProcessGrid(app_of(client), 6), 3)
    broken = make(**settings, retries=1, retry_cohort="same")
    start(broken, Lossy(app_of(client), 6, lambda push, node: push == number), 3)
    close(from_record(unbroken.arrays), from_record(broken.arrays), 0.0)
    assert [e["round"] for e in broken.history] == [1, 2, 3]
    entry, same = broken.history[number - 1], unbroken.history[number - 1]
    (attempt,) = entry["attempts"]
    assert attempt["cohort"] == entry["cohort"] == same["cohort"]
    assert set(attempt["failures"]) == set(attempt["cohort"])
    assert "needed 3" in attempt["failed"]
    assert "failed" not in entry
    assert "attempts" not in broken.history[2]


def test_a_round_that_a_users_code_refuses_at_its_end_binds_nobody() -> None:
    class Refusing(fr.FedADC):
        method = "FedADC"
        refused = 0

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            made = super().aggregate_train(server_round, replies)
            if server_round == 2 and not self.refused:
                self.refused += 1
                raise fr.TooFewReplies("not good enough")
            return made

    unbroken, broken = fr.FedADC(seed=3), Refusing(seed=3, retries=1, retry_cohort="same")
    for strategy in (unbroken, broken):
        start(strategy, fr.InProcessGrid(app_of(fr.FedADCClient), 4), 3)
    close(from_record(unbroken.arrays), from_record(broken.arrays), 0.0)
    assert [len(e.get("attempts", ())) for e in broken.history] == [0, 1, 0]


def test_what_a_training_keeps_is_after_a_round_that_failed_late_as_before_it() -> None:
    kept: list[dict[str, Any]] = []

    def mean(contents: Any, key: str) -> Any:
        if len(kept) == 2:
            raise KeyboardInterrupt("of the user's own")
        return MetricRecord({"mean": 1.0})

    def keep(entry: Any) -> None:
        kept.append(strategy.training.snapshot())

    terms = [fr.ControlVariates(), fr.SparseTernary(density_down=0.5)]
    more: dict[str, Any] = {"downlink": "delta", "incomplete": "drop", "drop_inactive": 0.5}
    more |= {"train_metrics_aggr_fn": mean, "on_round": keep, "fraction_evaluate": 0.0}
    strategy = fr.RegStrategy(terms, seed=1, **more)
    client = partial(fr.RegClient, terms=[*map(type, terms)])
    with pytest.raises(KeyboardInterrupt):
        start(strategy, fr.InProcessGrid(app_of(client), 3), 5)
    assert strategy.history[-1]["failed"] == "of the user's own"
    before, after = kept[-1], strategy.training.snapshot()
    assert before["model"]["coded_steps"]
    assert before["model"]["changed"]
    assert before["participation"]["turns"]
    for part in ("model", "participation", "guard", "remembered"):
        np.testing.assert_equal(after[part], before[part], part)


def test_who_replied_to_a_failed_attempt_holds_its_model(log: Log) -> None:
    settings: dict[str, Any] = {"seed": 3, "downlink": "delta", "min_replies": 4}
    unbroken, broken = fr.FedADC(**settings), fr.FedADC(**settings, retries=1)
    start(unbroken, fr.InProcessGrid(app_of(fr.FedADCClient), 4), 3)
    grid = Lossy(app_of(fr.FedADCClient), 4, lambda push, node: (push, node) == (2, 1000))
    start(broken, grid, 3)
    close(from_record(unbroken.arrays), from_record(broken.arrays), 0.0)
    assert log("clients [0] no longer hold their last model")
    (lost, *others), *_ = [[*e["bytes_down"].values()] for e in broken.history[1:]]
    assert max(others) < lost / 2


def test_a_new_cohort_is_drawn_and_the_next_rounds_draw_as_ever(log: Log) -> None:
    settings = {"seed": 3, "fraction_train": 0.34, "min_train_nodes": 2, "min_replies": 2}
    unbroken = fr.FedAvg(**settings)
    start(unbroken, fr.InProcessGrid(app_of(), 6), 3)
    broken = fr.FedAvg(**settings, retries=2)
    start(broken, Lossy(app_of(), 6, lambda push, node: push in (1, 2)), 3)
    drawn = [a["cohort"] for a in broken.history[0]["attempts"]] + [broken.history[0]["cohort"]]
    assert len(drawn) == 3
    assert drawn[0] == unbroken.history[0]["cohort"]
    assert len({tuple(c) for c in drawn}) > 1
    assert broken.history[1]["cohort"] == unbroken.history[1]["cohort"]
    assert log("attempt 3 of 3")


def test_too_few_attempts_end_the_training_with_the_model_before() -> None:
    strategy = fr.FedAvg(seed=3, retries=1, min_replies=6)
    with pytest.raises(fr.TooFewReplies, match=r"round 2 of FedAvg: 0 usable replies.*needed 6"):
        start(strategy, Lossy(app_of(), 6, lambda push, node: push > 1), 3)
    last = strategy.history[-1]
    assert (last["round"], len(last["attempts"])) == (2, 1)
    assert "needed 6" in last["failed"]
    one = fr.FedAvg(seed=3)
    start(one, fr.InProcessGrid(app_of(), 6), 1)
    close(from_record(one.arrays), from_record(strategy.arrays), 0.0)


def test_a_failed_attempt_binds_nobody() -> None:
    """One client that trains fewer parameters must not decide what all train, in a round that failed."""
    strategy = fr.FedAvg(seed=3, retries=1, min_replies=3)
    app = app_of(sabotage=freezing(0))
    start(strategy, Lossy(app, 4, lambda push, node: push == 1 and node != 1000), 1)
    assert strategy.history[0]["replies"] == [1, 2, 3]
    assert "trains other parameters" in strategy.history[0]["failures"][0]


@pytest.mark.parametrize("name", ["FedCM", "FedFOR", "FedADC", "EFL", "FedCurv", "FedAdamW"])
def test_a_client_that_trains_more_than_the_others_is_named_in_each_round(name: str) -> None:
    of = {"EFL": "lam", "FedCurv": "lam", "FedAdamW": "gamma"}.get(name, "alpha")
    strategy = getattr(fr, name)(**{of: 0.5}, seed=3)
    app = app_of(getattr(fr, f"{name}Client"), sabotage=freezing(1, 2, 3))
    start(strategy, fr.InProcessGrid(app, 4), 3)
    assert all("trains other parameters" in e["failures"][0] for e in strategy.history)


class Slow(fr.InProcessGrid):
    """Four nodes have begun to send, and Flower waits for the rest; two are pulled at once."""

    replies_at_once, both = False, threading.Barrier(2, timeout=10)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        (i,) = message_ids
        sent = self._replies[i].metadata
        if sent.src_node_id < 1004 and sent.message_type in ("train", "evaluate"):
            time.sleep(20)
        elif sent.message_type in ("train", "evaluate"):
            self.both.wait()
        return super().pull_messages([i])


def test_at_the_deadline_a_round_goes_on_with_who_replied() -> None:
    strategy = fr.FedADC(seed=3, deadline=0.3, drop_inactive=1e-9, fraction_evaluate=1.0)
    began = time.monotonic()
    start(strategy, Slow(app_of(fr.FedADCClient), 6), 3)
    assert time.monotonic() - began < 20  # a second for each exchange, and not for each node
    for entry in strategy.history:
        assert entry["late"] == [0, 1, 2, 3]
        assert entry["replies"] == [4, 5]
        assert {*entry["failures"].values()} == {"no reply within the deadline of 0.3 s"}
        assert "dropped_for_good" not in entry
        assert set(entry["evaluate"]["clients"]) == {4, 5}
    assert len(strategy.history[2]["cohort"]) == 6


@pytest.mark.parametrize(
    ("stop", "after"),
    [
        (fr.Target(0.3), 3),
        (fr.Target(0.25, "loss"), 3),
        (fr.Patience(2), 6),
        (fr.Patience(2, "accuracy", min_delta=0.5), 3),
        (fr.Patience(5, "accuracy", min_delta=0.5), 7),  # 0.6 after 0.1 is enough
        ([fr.Patience(9), fr.Target(0.2)], 2),
        (lambda history: len(history) == 4, 4),
        (lambda history: 1 / 0, 7),
        (lambda history: np.ones(2), 7),
    ],
    ids=["target", "loss", "patience", "min-delta", "just", "several", "own", "error", "array"],
)
def test_training_ends_early_by_its_history(stop: Any, after: int) -> None:
    losses = [0.0, 0.5, 0.3, 0.2, 0.1, float("nan"), 0.4, 0.3]

    def test(number: int, model: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": number / 10, "loss": losses[number]})

    strategy = fr.FedAvg(seed=1, stop_when=stop, fraction_evaluate=0.0)
    result = start(strategy, fr.InProcessGrid(app_of(), 2), 7, evaluate_fn=test)
    assert len(strategy.history) == after
    assert ("stopped" in strategy.history[-1]) == (after < 7)
    assert max(result.evaluate_metrics_serverapp) == after
    assert strategy.history[-1]["server_metrics"]["accuracy"] == after / 10


def test_a_metric_that_no_round_has_is_said_once(log: Log) -> None:
    history = [{"round": 1, "train_metrics": {"train-loss": 1.0, "acuracy": [0.1, 0.2]}}]
    for rule in (fr.Target(0.3, "acuracy"), fr.Patience(1, "acuracy")):
        assert [rule(history), rule([*history, {"round": 2}])] == ["", ""]
        (said,) = log("acuracy")
        assert said.startswith("round 1 has no metric 'acuracy' that is a number, only ['acu")
    said_by_clients = {"initial_metrics": {"acuracy": 0.1}, "evaluate_metrics": {"acuracy": 0.4}}
    assert not fr.Target(0.3, "acuracy")([{"round": 1, **said_by_clients}])
    assert not fr.Target(0.3, "Val_Loss")([{"round": 1, "server_metrics": {"Val_Loss": 0.4}}])
    assert log("only []; the server tested the initial model, so its tests alone count")


def test_patience_counts_the_rounds_that_were_tested() -> None:
    tested: list[dict[str, Any]] = [{"round": t} for t in range(1, 11)]
    for entry in tested[::3]:
        entry["server_metrics"] = {"loss": 1.0}
    stops = [bool(fr.Patience(2)(tested[:t])) for t in range(1, 11)]
    assert stops == [False] * 6 + [True] * 4  # the second test after the first, in round 7
    diverged = [{"round": t, "server_metrics": {"loss": float("nan")}} for t in range(1, 4)]
    assert fr.Patience(2)(diverged) == "loss has not improved on nan since round 1"


def test_a_clients_claims_end_nothing_where_the_server_tests_some_rounds() -> None:
    def test(number: int, model: ArrayRecord) -> MetricRecord | None:
        return MetricRecord({"accuracy": number / 10}) if number % 3 == 0 else None

    def lie(kind: str, pid: int, message: Message, reply: Message) -> Message:
        if kind == "evaluate":
            reply.content["metrics"]["accuracy"] = 1.0  # type: ignore[index]
        return reply

    strategy = fr.FedAvg(seed=1, stop_when=fr.Target(0.5), keep_best="accuracy")
    grid = Tampered(app_of(fr.FedAvgClient), 3, lie)
    result = start(strategy, grid, 7, evaluate_fn=test)
    assert len(strategy.history) == 6
    assert result.best
    assert (result.best.round, result.best.value) == (6, 0.6)
    assert strategy.history[0]["initial_metrics"] == {"accuracy": 0.0}
    assert sorted(result.evaluate_metrics_serverapp) == [0, 3, 6]


@pytest.mark.parametrize("schedule", [lambda t: 1 - t / 4, lambda t: 1 - t / 3.5])
def test_training_ends_before_the_learning_rate_is_0(schedule: Any, tmp_path: Path) -> None:
    """Callbacks see why; a training that is resumed there ends there, too."""
    seen: list[str | None] = []
    settings: dict[str, Any] = {"seed": 1, "lr_schedule": schedule, "checkpoint_dir": tmp_path}
    settings["on_round"] = lambda entry: seen.append(entry.get("stopped"))
    why = r"lr_schedule\(4\) makes the learning rate -?0.*, with which clients cannot train"
    for more in ({}, {"resume_from": tmp_path}):
        strategy = fr.FedAvg(**settings)
        start(strategy, fr.InProcessGrid(app_of(), 2), 7, **more)
        assert len(strategy.history) == 3
        assert re.fullmatch(why, strategy.history[-1]["stopped"])
    assert seen == [None, None, strategy.history[-1]["stopped"]]
    exact = fr.FedAvg(**settings | {"checkpoint_dir": None})
    start(exact, fr.InProcessGrid(app_of(), 2), 3)
    assert "stopped" not in exact.history[-1]


def test_callbacks_get_their_own_copy_and_may_fail(log: Log) -> None:
    seen: list[int] = []
    strategy = fr.FedAvg(seed=1, on_round=[lambda e: 1 / 0, lambda e: seen.append(e.pop("round"))])
    start(strategy, fr.InProcessGrid(app_of(), 2), 2)
    assert seen == [entry["round"] for entry in strategy.history] == [1, 2]
    assert log("failed in round 1: ZeroDivisionError: division by zero")


def test_rounds_are_written_as_the_run_goes_and_an_old_file_is_kept(tmp_path: Path) -> None:
    path, lines = tmp_path / "runs" / "history.jsonl", list[int]()

    def rounds(key: str = "round", of: Path = path) -> list[Any]:
        return [json.loads(line).get(key) for line in of.read_text().splitlines()]

    callbacks = [fr.JsonLines(path), lambda e: lines.append(len(rounds()))]
    board = fr.TensorBoard(tmp_path)
    strategy = fr.FedAvg(seed=1, on_round=[*callbacks, board])
    start(strategy, fr.InProcessGrid(app_of(), 2), 3)
    assert lines == rounds() == [1, 2, 3]
    again = fr.JsonLines(path)  # of a training that goes on after round 1, and was cut in a line
    with path.open("a") as file:
        file.write('{"round": 4, "coh')
    for number in (2, 3):
        again({"round": number, "resumed": True})
    assert rounds("resumed") == [None, True, True]
    again({"round": 1})  # of another training
    assert rounds() == [1]
    assert rounds(of=tmp_path / "runs" / "history.jsonl.1") == [1, 2, 3]
    events = pytest.importorskip(  # it may need another protobuf than Flower
        "tensorboard.backend.event_processing.event_accumulator", exc_type=ImportError
    )
    read = events.EventAccumulator(str(tmp_path))
    read.Reload()
    for tag, value in numbers(strategy.history[2]).items():
        event = read.Scalars(tag)[-1]
        assert event.step == 3
        assert event.value == pytest.approx(value, rel=1e-6)
    curves = {"evaluate_metrics/accuracy", "bytes_up", "seconds/clients"}
    assert curves <= set(read.Tags()["scalars"])
    board({"round": 1, "epsilon": 0.5})  # of another training
    read.Reload()
    assert [len(read.Scalars(tag)) for tag in ("bytes_up", "epsilon")] == [0, 1]
    # as on a full disk
    resource, full = pytest.importorskip("resource"), path.stat().st_size + 9
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            again({"round": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again({"round": 3})
    assert rounds() == [1, 3]  # nothing is left of the line that did not fit


ACCURACIES = [0.1, 0.5, 0.8, float("nan"), 0.8, 0.2]
"""Of round 0 and later."""


@pytest.mark.parametrize(
    ("keep_best", "number", "value"),
    [
        ("accuracy", 2, 0.8),  # the first of equal ones; NaN and the initial model are never best
        ("error", 1, 0.5),  # less is better
        ("loss", 3, 1e6),  # the server's, once it has any: clients measured less before
        (lambda entry: np.float32(-entry["round"]) if entry["round"] > 3 else None, 4, -4.0),
        (lambda entry: "much", None, None),  # logged
        (lambda entry: entry["nothing"], None, None),  # it raises: logged, and nothing is best
        ("list", None, None),
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_the_best_rounds_model_is_kept_also_by_a_resumed_run(
    keep_best: Any, number: int | None, value: float | None, broken: bool, tmp_path: Path
) -> None:
    models: dict[int, Any] = {}

    def evaluate(at: int, arrays: ArrayRecord) -> MetricRecord:
        models[at] = arrays.to_torch_state_dict()
        errors = {"error": [9, 0.5, 0.5, 1, 1, 1][at], **({"loss": 1e6} if at > 2 else {})}
        return MetricRecord({"accuracy": ACCURACIES[at], "list": [0.1, 0.2], **errors})

    settings = {"seed": 7, "keep_best": keep_best, "checkpoint_dir": tmp_path}
    grid = fr.InProcessGrid(app_of(fr.FedAvgClient), 3)
    if broken:
        start(fr.FedAvg(**settings), grid, 2, evaluate_fn=evaluate)
    strategy, begun = fr.FedAvg(**settings), tmp_path if broken else None
    result = start(strategy, grid, 5, evaluate_fn=evaluate, resume_from=begun)
    if number is None:
        assert result.best is None
        return
    assert (result.best.round, result.best.value) == (number, value)
    close(result.best.arrays.to_torch_state_dict(), models[number], 0)


def test_the_log_has_a_line_a_round(log: Log) -> None:
    """A round's line says who replied, and the metrics of all who measured."""
    grid = Lossy(app_of(fr.FedAvgClient), 4, lambda push, node: push == 2 and node % 2 == 0)
    tests = iter([None, MetricRecord({"accuracy": 0.5}), MetricRecord({"accuracy": 0.625})])
    strategy = fr.FedAvg(seed=7, min_replies=1)
    start(strategy, grid, 2, evaluate_fn=lambda number, arrays: next(tests), timeout=1.0)
    lines = [line for line in log() if line.startswith("round")]
    expected = [(r"4 of 4", "0.5"), (r"2 of 4", "0.625")]
    for number, (line, (clients, server)) in enumerate(zip(lines, expected, strict=True), start=1):
        words = rf"round {number}/2   {clients} clients   train-loss \S+   clients: .*loss.*"
        assert re.fullmatch(rf"{words}   server: accuracy {server}   \S+ s", line), line
    assert line_of({"round": 1, "seconds": {"clients": 231.4}}, 2) == "round 1/2   231 s"


@pytest.mark.parametrize(("steps", "warned"), [(2, 1), (1, 0)])
def test_a_bound_on_what_steps_weigh_is_said_once(log: Log, steps: int, warned: int) -> None:
    """Where one of four clients takes half of the others' steps, the bound changes FedNova's weights."""
    client = budgeted(fr.FedNovaClient, [dict.fromkeys((0, 1, 2), steps) | {3: 1}])
    run(fr.FedNova(max_scale=1.5, seed=3), client, rounds=3)
    assert "".join(log()).count("max_scale=1.5 has bounded what clients weigh") == warned
