"""What papers report, computed from hand-made histories."""

from __future__ import annotations

from typing import Any

import pytest

from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report.rows import figures
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.settings import DEFAULTS


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


def made(accuracy: list[float], seed: int = 1, **more: Any) -> RunRecord:
    """A run of as many rounds, whose initial model has 10 %."""
    job = {**DEFAULTS, "rounds": len(accuracy), "target-accuracy": 0.5}
    run = RunRecord("A", "A", seed, job, 4, {}, ended=True)
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
    got = figures(RUN)[name]
    assert got == (None if value is None else pytest.approx(value))


def test_participants_count_with_their_own_models() -> None:
    one = {0: {"accuracy": 0.2, "personal-accuracy": 0.6}, 1: {"accuracy": 0.8}}
    run = made([0.2, 0.3], evaluate={"clients": one})
    run.rounds[1]["evaluate"] = {"clients": {0: {"accuracy": 0.5}, 1: {"accuracy": 0.5}}}
    assert figures(run)["best-participants"] == pytest.approx(0.7)
    assert figures(run)["clients"] == pytest.approx(0.5)


def test_metrics_are_of_the_rounds_clients_and_messages_that_they_name() -> None:
    run = made([0.9, 0.1, 0.5, 0.3, 0.4, 1.0], bytes_down={0: 300, 1: 100}, bytes_up={0: 5, 1: 50})
    run.job["rounds"] = 3  # planned: the first is its half
    run.test[-1]["ensemble"] = 0.7
    run.per_client = {"clients": [0.01 * i for i in reversed(range(39))]}
    assert figures(run)["best-half"] == 0.9
    assert figures(run)["last5"] == pytest.approx(0.46)
    assert figures(run)["mean"] == pytest.approx(3.2 / 6)
    assert figures(run)["ensemble"] == 0.7
    assert figures(run)["worst"] == 0
    assert figures(run)["worst-tenth"] == pytest.approx(0.01)  # three of 39
    phones = 3e-4 / 0.75 + 5e-5 / 0.25 + 7 * 0.75 + 10 + 0.5  # they wait for the largest messages
    assert figures(run)["deployed-seconds"] == pytest.approx(phones, abs=1e-6)
    run.job["target-accuracy"] = 0.5
    assert figures(made([0.4, 0.5, 0.6]))["rounds-to"] == 2  # where it is met
    for name in ("rounds-to", "seconds-to", "megabytes-to", "gradients-to"):
        assert figures(made([0.2, 0.3]))[name] is None
    nothing = figures(RunRecord("A", "A", 1, {**DEFAULTS}, 4, {}))
    assert {*nothing.values()} == {None}
    assert {*metrics.METRICS} < {*nothing}


def test_what_is_sent_before_a_round_or_in_a_first_exchange_counts() -> None:
    run = made([0.5], bytes_ahead={0: 30, 1: 10}, bytes_probe_down={0: 7, 1: 7})
    run.rounds[0]["seconds"]["probe"] = 0.5
    assert figures(run)["bytes-down"] == 120
    assert figures(run)["exchanges"] == 2
    assert metrics.mean_and_spread("bytes-beside", [run], [made([0.5])])[0] == 20
    plain, probed = (figures(r)["deployed-seconds"] for r in (made([0.5]), run))
    assert plain is not None
    assert probed == pytest.approx(plain + 7 * 0.25)


def test_means_are_over_the_seeds_that_ended_and_beside_the_first_method() -> None:
    runs = [made([0.4], seed=1), made([0.6], seed=2), made([0.9], seed=3)]
    runs[2].ended = False
    assert metrics.mean_and_spread("final", runs) == pytest.approx((0.5, 0.02**0.5, 2))
    # each seed beside its own; one that the first method does not have is left out
    first = [made([0.4], seed=1), made([0.6], seed=2, bytes_down={0: 110, 1: 130})]
    more = [made([0.4], seed=s, bytes_down={0: 130, 1: 150}) for s in (1, 2, 3)]
    assert metrics.mean_and_spread("bytes-beside", more, first) == pytest.approx((30, 200**0.5, 2))
    assert metrics.mean_and_spread("bytes-beside", first, first)[0] == 0


def test_accuracies_are_shown_in_per_cent() -> None:
    for name, numbers, text in (
        ("final", (0.12345, None), "12.35"),
        ("final", (0.5, 0.0123), "50.00 ± 1.23"),
        ("bytes-down", (19948.0, None), "19,948"),
        ("training-loss", (0.1234, None), "0.123"),
        ("rounds-to", (None, None), "–"),
    ):
        assert metrics.shown(name, *numbers) == text
