"""What papers report, computed from hand-made histories."""

from __future__ import annotations

from typing import Any

import pytest

from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report.run_records import Run
from flwr_regs.experiments.settings.settings import DEFAULTS


def entry(t: int, **more: Any) -> dict[str, Any]:
    """A round with two clients: 100 bytes down and 50 up each, 2 seconds, 30 examples."""
    return {
        "round": t,
        "cohort": [0, 1],
        "bytes_down": {0: 100, 1: 100},
        "bytes_up": {0: 50, 1: 50},
        "seconds": {"clients": 1.5, "aggregate": 0.5},
        "examples_processed": 30,
        "train_metrics": {"train-loss": 1.0 / t},
        **more,
    }


def made(accuracy: list[float], seed: int = 1, **more: Any) -> Run:
    """A run of as many rounds, whose initial model has 10 %."""
    job = {**DEFAULTS, "rounds": len(accuracy), "target-accuracy": 0.5}
    run = Run("A", "A", seed, job, 4, {}, ended=True)
    run.test = [{"round": t, "accuracy": a} for t, a in enumerate([0.1, *accuracy])]
    run.rounds = [entry(t, **more) for t in range(1, len(accuracy) + 1)]
    run.per_client = {"clients": [0.9, 0.5, 0.7, 0.8]}
    return run


RUN = made([0.2, 0.6, 0.4, 0.8])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("final", 0.8),
        ("last5", 0.5),
        ("best", 0.8),
        ("best-half", 0.6),
        ("mean", 0.5),
        ("worst", 0.5),
        ("worst-tenth", 0.5),
        ("training-loss", 0.25),
        ("rounds-to", 2),
        ("seconds-to", 4.0),
        ("megabytes-to", 600 / 4 / 1e6),
        ("gradients-to", 60),
        ("seconds-round", 2.0),
        ("gradients", 120),
        ("bits", 8 * 4 * 300),
        ("bytes-down", 100),
        ("bytes-up", 50),
        ("exchanges", 1),
        # 100 B at 0.75 MB/s, 50 B at 0.25 MB/s, 7 times half of 1.5 s, 10 s, and the server's half
        ("deployed-seconds", 1e-4 / 0.75 + 5e-5 / 0.25 + 7 * 0.75 + 10 + 0.5),
        ("best-participants", None),
        ("clients", None),
        ("ensemble", None),
    ],
)
def test_each_metric_is_what_its_meaning_says(name: str, value: float | None) -> None:
    found = metrics.METRICS[name].of(RUN)
    assert found == (None if value is None else pytest.approx(value))


def test_all_metrics_have_a_case_above() -> None:
    (mark,) = test_each_metric_is_what_its_meaning_says.pytestmark
    assert {case[0] for case in mark.args[1]} | {"bytes-beside"} == {*metrics.METRICS}


def test_participants_count_with_their_own_models() -> None:
    one = {0: {"accuracy": 0.2, "personal-accuracy": 0.6}, 1: {"accuracy": 0.8}}
    run = made([0.2, 0.3], evaluate={"clients": one})
    run.rounds[1]["evaluate"] = {"clients": {0: {"accuracy": 0.5}, 1: {"accuracy": 0.5}}}
    assert metrics.METRICS["best-participants"].of(run) == pytest.approx(0.7)
    assert metrics.METRICS["clients"].of(run) == pytest.approx(0.5)


def test_the_half_is_of_the_planned_rounds() -> None:
    run = made([0.1, 0.2, 0.3, 0.4])
    run.job["rounds"] = 8
    assert metrics.METRICS["best-half"].of(run) == 0.4


def test_the_last_five_rounds_are_not_all() -> None:
    run = made([0.9, 0.1, 0.2, 0.3, 0.4, 1.0])
    assert metrics.METRICS["last5"].of(run) == pytest.approx(0.4)
    assert metrics.METRICS["mean"].of(run) == pytest.approx(2.9 / 6)


def test_a_target_is_reached_where_it_is_met() -> None:
    assert metrics.METRICS["rounds-to"].of(made([0.4, 0.5, 0.6])) == 2


def test_the_worst_tenth_is_of_the_clients() -> None:
    run = made([0.5])
    run.per_client = {"clients": [0.01 * i for i in reversed(range(39))]}
    assert metrics.METRICS["worst"].of(run) == 0
    assert metrics.METRICS["worst-tenth"].of(run) == pytest.approx(0.01)  # three of 39


def test_what_is_sent_before_a_round_or_in_a_first_exchange_counts() -> None:
    run = made([0.5], bytes_ahead={0: 30, 1: 10}, bytes_probe_down={0: 7, 1: 7})
    run.rounds[0]["seconds"]["probe"] = 0.5
    assert metrics.METRICS["bytes-down"].of(run) == 120
    assert metrics.METRICS["exchanges"].of(run) == 2
    assert metrics.mean_and_spread("bytes-beside", [run], [made([0.5])])[0] == 20
    plain, probed = (metrics.METRICS["deployed-seconds"].of(r) for r in (made([0.5]), run))
    assert plain is not None
    assert probed == pytest.approx(plain + 7 * 0.25)


def test_a_round_on_phones_waits_for_the_largest_messages() -> None:
    run = made([0.5], bytes_down={0: 300, 1: 100}, bytes_up={0: 5, 1: 50})
    want = 3e-4 / 0.75 + 5e-5 / 0.25 + 7 * 0.75 + 10 + 0.5
    assert metrics.METRICS["deployed-seconds"].of(run) == pytest.approx(want, abs=1e-6)


def test_the_ensemble_is_tested_beside_the_model() -> None:
    run = made([0.5, 0.6])
    run.test[-1]["ensemble"] = 0.7
    assert metrics.METRICS["ensemble"].of(run) == 0.7


def test_a_target_that_is_not_reached_has_no_rounds() -> None:
    run = made([0.2, 0.3])
    for name in ("rounds-to", "seconds-to", "megabytes-to", "gradients-to"):
        assert metrics.METRICS[name].of(run) is None


def test_a_run_without_rounds_has_no_numbers() -> None:
    run = Run("A", "A", 1, {**DEFAULTS}, 4, {})
    assert {metric.of(run) for metric in metrics.METRICS.values()} == {None}


def test_means_are_over_the_seeds_that_ended_and_beside_the_first_method() -> None:
    runs = [made([0.4], seed=1), made([0.6], seed=2), made([0.9], seed=3)]
    runs[2].ended = False
    assert metrics.mean_and_spread("final", runs) == pytest.approx((0.5, 0.02**0.5, 2))
    more = [made([0.4], seed=1, bytes_down={0: 130, 1: 150}), made([0.6], seed=2)]
    assert metrics.mean_and_spread("bytes-beside", more, runs) == pytest.approx((20, 800**0.5, 2))
    assert metrics.mean_and_spread("bytes-beside", runs, runs)[0] == 0
    # each seed beside its own; one that the first method does not have is left out
    first = [made([0.4], seed=1), made([0.6], seed=2, bytes_down={0: 110, 1: 130})]
    more = [made([0.4], seed=s, bytes_down={0: 130, 1: 150}) for s in (1, 2, 3)]
    assert metrics.mean_and_spread("bytes-beside", more, first) == pytest.approx((30, 200**0.5, 2))


@pytest.mark.parametrize(
    ("name", "value", "spread", "text"),
    [
        ("final", 0.12345, None, "12.35"),
        ("final", 0.5, 0.0123, "50.00 ± 1.23"),
        ("bytes-down", 19948.0, None, "19,948"),
        ("training-loss", 0.1234, None, "0.123"),
        ("rounds-to", None, None, "–"),
    ],
)
def test_accuracies_are_shown_in_per_cent(
    name: str, value: float | None, spread: float | None, text: str
) -> None:
    assert metrics.shown(name, value, spread) == text
