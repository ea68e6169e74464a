"""Tuning by hand: which points train how long, which one is chosen, and what is tried beyond an edge."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log, sqrt

import pytest

from flwr_regs.experiments.experiment import Experiment, Run
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.run import tuning
from flwr_regs.experiments.space import Space, edges, points

Accuracy = Callable[[Run], float]


def bench(*tune: str, methods: str = "FedAvg", trials: int = 12) -> Experiment:
    spaces = tuple(map(Space.read, tune))
    given = {"methods": methods, "rounds": 40}
    return Experiment.of_methods(given, tune=spaces, trials=trials, baseline=True)


def tuned(
    experiment: Experiment, accuracy: Accuracy, error: Callable[[Run], str] = lambda run: ""
) -> tuple[dict[str, dict[str, object]], list[list[Run]]]:
    """Tune on trials whose accuracies are given; return what comes of it, and what each call trained."""
    calls: list[list[Run]] = []

    def record(run: Run) -> RunRecord:
        record = RunRecord(run.label, run.method, run.seed, run.settings.config, 10, {})
        for number in range(1, run.settings.rounds + 1):
            record.test.append({"round": number, "accuracy": accuracy(run), "loss": 0.0})
        record.ended = True
        record.error = error(run)
        record.diverged = "nan" in record.error
        return record

    def train(runs: Sequence[Run]) -> dict[tuple[str, int], RunRecord]:
        calls.append([*runs])
        return {run.key: record(run) for run in runs}

    panel = experiment.panel
    return tuning.tuned(experiment, panel, experiment.rows_of(panel), train), calls


def near(lr: float) -> Accuracy:
    """Return an accuracy that is highest at a learning rate, whatever the rounds are."""
    return lambda run: 1 - 0.1 * abs(log(run.settings.lr / lr))


def test_an_eighth_a_quarter_and_half_of_the_rounds_for_12_4_and_2_points() -> None:
    experiment = bench("lr=0.02..1", methods="FedAvg, FedProx(0.1)")
    outcomes, calls = tuned(experiment, near(0.15))
    shape = [(len(runs), {run.settings.rounds for run in runs}) for runs in calls]
    assert shape == [(24, {5}), (8, {10}), (4, {20})]
    rates = [point["lr"] for point in experiment.points_of(experiment.rows[0])]
    rates.sort(key=lambda lr: abs(log(lr / 0.15)))
    for label in ("FedAvg", "FedProx(0.1)"):
        last = [run.settings.lr for run in calls[2] if run.label.startswith(label)]
        assert last == rates[:2]
        among = {"trials": 12, "lost": 0, "budget": 12, "grid": 0, "widened": [], "edge": []}
        assert outcomes[label] == {"point": {"lr": rates[0]}, "spaces": ["lr=0.02..1"], **among}


def test_what_leads_early_and_falls_behind_is_not_chosen() -> None:
    def accuracy(run: Run) -> float:
        best = near(0.1 if run.settings.rounds < 20 else 0.2)
        return best(run)

    experiment = bench("lr=0.02..1")
    rates = [point["lr"] for point in experiment.points_of(experiment.rows[0])]
    early = sorted(rates, key=lambda lr: abs(log(lr / 0.1)))[:2]
    outcomes, _ = tuned(experiment, accuracy)
    assert outcomes["FedAvg"]["point"] == {"lr": min(early, key=lambda lr: abs(log(lr / 0.2)))}


@pytest.mark.parametrize(("best", "side"), [(5.0, (1, sqrt(50))), (0.004, (0.02 / sqrt(50), 0.02))])
def test_a_range_is_widened_once_where_the_best_is_at_its_edge(
    best: float, side: tuple[float, float]
) -> None:
    outcomes, calls = tuned(bench("lr=0.02..1"), near(best))
    first, again = ({run.settings.lr for run in runs} for runs in calls[:2])
    beyond = again - first
    assert len(beyond) == 4
    assert all(0.99 * side[0] <= lr <= 1.01 * side[1] for lr in beyond)
    assert [len(runs) for runs in calls] == [12, 16, 4, 2]
    found = outcomes["FedAvg"]
    assert found["point"] == {"lr": min(beyond, key=lambda lr: abs(log(lr / best)))}
    assert (found["trials"], found["widened"]) == (16, ["lr"])


def test_what_is_at_the_edge_of_a_widened_range_is_said() -> None:
    outcomes, _ = tuned(bench("lr=0.02..1"), near(1000.0))
    outcomes["FedADC"] = {"trials": 2, "budget": 2, "grid": 5, "spaces": ["lr=1,2"]}
    said, other, unlike, unequal = tuning.notes(
        {"FedAvg": {"lr": 6.6}, "FedADC": {"lr": 1.0}}, outcomes
    )
    assert "the best of 2 of 5 points of a grid on held-out data" in other
    assert unlike == "not tuned alike: lr=0.02..1 and lr=1,2"
    assert "the budgets are not equal" in unequal
    assert outcomes["FedAvg"]["edge"] == ["lr"]
    assert said.endswith("(lr is at the edge of what was tried, which was widened)")
    assert "the best of 16 on held-out data" in said


def test_a_range_is_not_widened_beyond_what_is_legal() -> None:
    experiment = bench("FedADC.beta=0.5..0.95", methods="FedADC")
    outcomes, calls = tuned(experiment, lambda run: float(str(run.method).partition("=")[2][:-1]))
    assert [len(runs) for runs in calls] == [12, 4, 2]
    assert (outcomes["FedADC"]["widened"], outcomes["FedADC"]["edge"]) == ([], ["FedADC.beta"])
    for key in ("local_epochs", "local_steps"):  # 0 is refused, or means another thing
        whole = bench(f"{key.replace('_', '-')}=1..8", trials=8)
        outcomes, calls = tuned(whole, lambda run, key=key: -getattr(run.settings, key))
        assert (outcomes["FedAvg"]["widened"], len(calls[0])) == ([], 8)


def test_a_grid_and_few_points_train_for_all_rounds() -> None:
    _, calls = tuned(bench("lr=0.1,0.2,0.3,0.4,0.5,0.6,0.7"), near(0.3))
    assert [(len(runs), runs[0].settings.rounds) for runs in calls] == [(7, 40)]
    _, calls = tuned(bench("lr=0.02..1", trials=5), near(0.3))
    assert [(len(runs), runs[0].settings.rounds) for runs in calls] == [(5, 40)]


def test_a_diverged_point_is_the_worst_and_failures_end_it() -> None:
    experiment = bench("lr=0.1,0.2,0.3")

    def diverges(run: Run) -> str:
        return "nan" * (run.settings.lr > 0.15)

    some, all_ = (tuned(experiment, near(0.3), of)[0] for of in (diverges, lambda run: "nan"))
    assert some["FedAvg"]["point"] == {"lr": 0.1}
    for outcomes, lost in ((some, "2 of them diverged or failed)"), (all_, "tune over other val")):
        assert lost in tuning.notes({"FedAvg": {"lr": 0.1}}, outcomes)[0]
    with pytest.raises(RuntimeError, match="FedAvg: all of its 3 trials of 40 rounds failed: no"):
        tuned(experiment, near(0.3), lambda run: "no memory")


def test_a_point_that_diverges_later_is_not_chosen() -> None:
    def diverges(run: Run) -> str:
        return "nan" * (run.settings.rounds > 5 and run.settings.lr > 0.2)

    outcomes, calls = tuned(bench("lr=0.02..1"), near(1), diverges)
    lost = [run.point for runs in calls for run in runs if diverges(run)]
    assert lost
    assert outcomes["FedAvg"]["point"] not in lost


def test_a_row_may_be_tuned_where_the_others_are_not() -> None:
    experiment = bench(methods="FedAvg, FedProx(0.1)")
    plain, row = experiment.rows
    rows = plain, replace(row, tune=(Space.read("lr=0.1,0.2"),))
    runs = replace(experiment, rows=rows).trial_runs(experiment.panel)
    assert [run.settings.lr for run in runs if run.row == row.name] == [0.1, 0.2]


def test_each_eighth_of_a_range_has_one_of_eight_points() -> None:
    tried = points([Space.read("lr=0.01..1"), Space.read("FedProx.mu=0.001..1")], 8)
    for key, low, decades in (("lr", 0.01, 2), ("FedProx.mu", 0.001, 3)):
        eighths = [int(8 * log(point[key] / low, 10) / decades) for point in tried]
        assert sorted(eighths) == [*range(8)]
    assert edges({"a": 1, "b": 2, "c": 3}, [{"a": i, "b": 2 - i % 2, "c": 3} for i in (1, 2, 3)])
    two_values = [{"b": 1}, {"b": 2}, {"b": 2}]
    assert edges({"b": 2}, two_values) == {}
    assert edges({"b": 3}, [*two_values, {"b": 3}]) == {"b": True}
