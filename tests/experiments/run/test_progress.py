"""What is said of a run before and while it trains: its cost, and what it is at."""

import re
import time
from dataclasses import replace
from typing import Any

import pytest

from flwr_regs.experiments.cli import main
from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.run import costs, engine, progress
from flwr_regs.experiments.run.clients import RunClients
from flwr_regs.experiments.run.progress import Heartbeat, Lines, duration
from flwr_regs.experiments.run.server_accuracy import ServerTest
from tests.experiments.runs import runs_of

QUICK: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "num_clients": 4}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((2e-6, "2 µs"), (0.0034, "3.4 ms"), (0.1, "100 ms"), (40.2, "40 s"), (720, "12 min")),
        *((3 * 3600 + 1200, "3 h 20 min"), (0.0, "0.01 µs")),
    ],
)
def test_a_time_is_said_as_people_say_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("after", ["SILENCE", "PIPED"])
def test_only_what_takes_long_is_told(after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, after, 0.5)
    monkeypatch.setattr("sys.stdout.isatty", lambda: after == "SILENCE")
    told: list[str] = []
    with progress.progress([]).screen, Heartbeat(told.append) as heartbeat:
        for done in range(4):  # each part is quick, the whole is not
            heartbeat.at("testing examples", 1000 * done, 8000)
            time.sleep(0.3)
        for what, seconds in (("a moment", 0.3), ("another moment", 0.3), ("", 0.8)):
            heartbeat.at(what)
            time.sleep(seconds)
    assert any(re.fullmatch(r"testing examples, [123],000 of 8,000, .+ s left", t) for t in told)
    assert any("moment" in text for text in told) == (after == "PIPED")  # where short ones add up
    assert len(told) <= 2  # seldom, as it goes on


def test_what_a_client_takes_is_not_measured_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PIPED", 0.3)

    def slowly(_: Run) -> str:
        time.sleep(0.8)
        return "one client: 1 s a round"

    monkeypatch.setattr(costs, "measure", slowly)
    assert main(["resources", "methods=FedAvg"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"training a client, .* so far", first)
    assert last == "one client: 1 s a round"


def test_a_resumed_run_says_where_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = runs_of(methods="FedAvg", rounds=9)
    lines = Lines([run])
    lines.round(*run.key, 5, 0.5)
    lines.round(*run.key, 6, 0.5)
    assert capsys.readouterr().out.count("goes on after round 4") == 1


def test_a_training_says_its_cost_and_what_it_is_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PIPED", 0.15)
    examples, outputs = RunClients.examples, ServerTest.outputs

    def slowly(self: RunClients, *args: Any) -> Any:
        time.sleep(0.3)
        return examples(self, *args)

    def late(self: ServerTest, *args: Any) -> Any:
        self._told(100, 360)
        time.sleep(0.5)
        return outputs(self, *args)

    monkeypatch.setattr(RunClients, "examples", slowly)
    monkeypatch.setattr(ServerTest, "outputs", late)
    runs = runs_of(methods="FedAvg", **QUICK)
    engine.execute(runs, None, Lines(runs))
    said = capsys.readouterr().out
    before, _, after = said.partition("1 run of 2 rounds; in each round 4 clients with 12 steps")
    assert before.splitlines()[-1].startswith("about ")
    assert "FedAvg testing examples, 100 of 360, " in after
    assert re.search(r"^FedAvg round    1/2   clients train, \d of 4", after, re.M)
    assert "FedAvg round    2/2   accuracy" in after


def test_a_cost_is_arithmetic_over_a_step_and_a_test_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each for a model, whatever the methods."""
    given = {"rounds": 10, "fraction_train": 0.5, "local_epochs": 2, "examples_per_client": 64}
    runs = runs_of(methods="FedAvg, EFL(1.0)", **given)
    of_model = costs.Timed(step=0.002, turn=0.5, test=0.25, tested=250)
    cost = costs.cost_of(runs[0], of_model)
    assert (cost.cohort, cost.steps, cost.test) == (5, 4, pytest.approx(0.36))
    assert cost.run == pytest.approx(10 * 5 * (0.5 + 4 * 0.002) + 11 * 0.36)
    tested = replace(runs[0].settings, test_on_clients=True, test_examples=9)
    on_clients = replace(runs[0], settings=tested)
    assert costs.cost_of(on_clients, of_model).test == pytest.approx(10 * 9 * 0.001)
    asked: list[Any] = []
    monkeypatch.setattr(costs, "timed", lambda run: asked.append(run) or of_model)
    again = [replace(run, settings=replace(run.settings, seed=8)) for run in runs]
    again[0] = replace(again[0], label="FedAvg [lr=0.1]")  # a trial
    known: dict[Any, Any] = {}
    lines = [*costs.estimate([*runs, *again], 1, known, {})]
    assert len(asked) == 1
    each, steps = f"2 x {duration(cost.run)}", "4 local steps a round"
    assert lines[2] == f"{'FedAvg':<50}  {each} (1 trial and 1 test), {steps}"
    assert lines[3].startswith(f"{'EFL(1.0)':<50}  {each}, {steps}; and, not counted, a gradient ")
    whole = f"4 runs, about {duration(4 * cost.run)} with 1 at a time"
    assert lines[4] == f"in all {whole}"
    (line,) = costs.estimate([*runs, *again], 1, known, {}, "card, two")
    assert re.fullmatch(rf"card, two: digits, .*, {whole}", line)
    lines = [*costs.estimate(runs, 1, known, {runs[0].key: 5})]
    assert lines[1] == f"FedAvg, seed {runs[0].seed}: 5 of 10 rounds are there"
    assert lines[-1] == f"in all 2 runs, about {duration(1.5 * cost.run)} with 1 at a time"


@pytest.mark.parametrize(
    "method", ["SCAFFOLD", "FedAvg(aggregator=Krum(1), min_replies=5)", "FedBN", "RFedAvgPlus(0.1)"]
)
def test_one_client_is_tried_out_of_any_method(method: str) -> None:
    given = {"dataset": "digits-domains", "partition": "iid"} if method == "FedBN" else {}
    (run,) = runs_of(methods=method, num_clients=5, straggler_share=1.0, **given)
    entry = costs.try_out(run, local_steps=2)
    assert len(entry["cohort"]) == 1
    assert entry["steps"] == {entry["cohort"][0]: 2}
    assert costs.cost_of(run, costs.timed(run)).run > 0
