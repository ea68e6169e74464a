"""What papers report, computed from hand-made histories."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report.metrics import figures
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.settings import DEFAULTS
from tests.experiments.report.test_results import run as recorded


def made(accuracy: list[float], seed: int = 1, **more: Any) -> RunRecord:
    """A run from 10 %: two clients a round, each 100 bytes down and 50 up; 2 seconds, 30 examples."""
    run = recorded("A", accuracy, seed)
    run.job |= {"rounds": len(accuracy), "target-accuracy": 0.5}
    sent = {"bytes_down": {0: 100, 1: 100}, "bytes_up": {0: 50, 1: 50}}
    spent = {"seconds": {"clients": 1.5, "aggregate": 0.5}, "examples_processed": 30}
    for t, entry in enumerate(run.rounds, start=1):
        entry |= {"train_metrics": {"train-loss": 1.0 / t}, **sent, **spent, **more}
    run.keep_clients(np.array([0.9, 0.5, 0.7, 0.8]))
    return run


# 100 B at 0.75 MB/s, 50 B at 0.25 MB/s, 7 times half of 1.5 s, 10 s, and the server's half
PHONES = 1e-4 / 0.75 + 5e-5 / 0.25 + 7 * 0.75 + 10 + 0.5
RUN = made([0.2, 0.6, 0.4, 0.8])
LOW = made([0.2, 0.3])
LONG = made([0.9, 0.1, 0.5, 0.3, 0.4, 1.0], bytes_down={0: 300, 1: 100}, bytes_up={0: 5, 1: 50})
LONG.job["rounds"] = 3  # planned: the first is its half
LONG.test[-1]["ensemble"] = 0.7
LONG.keep_clients(np.array([0.01 * i for i in reversed(range(39))]))
UNLIKE = made([0.2], steps={0: 3, 1: 1})
TWICE = {"clients": 1.5, "aggregate": 0.5, "probe": 0.5}
PROBED = made(
    [0.5 - 1e-12], bytes_ahead={0: 30, 1: 10}, bytes_probe_down={0: 7, 1: 7}, seconds=TWICE
)
FAILED = {
    "cohort": [0, 1],
    "bytes_down": {0: 100},
    "bytes_up": {0: 50},
    "seconds": {"clients": 1.5},
}
AGAIN = made([0.6], attempts=[FAILED, FAILED, {"seconds": {}}])
OWN = {0: {"accuracy": 0.2, "personal-accuracy": 0.6}, 1: {"accuracy": 0.8}}
TESTED = made([0.2, 0.3], evaluate={"clients": OWN})
TESTED.rounds[1]["evaluate"] = {"clients": {0: {"accuracy": 0.5}, 1: {"accuracy": 0.5}}}
KEPT = made([0.2, 0.6, 0.4])
del KEPT.rounds[1:]  # as an archive keeps a trial: one entry, with the rounds' totals
VALUES: list[tuple[RunRecord, dict[str, float | None]]] = [
    (RUN, {"final": 0.8, "last5": 0.5, "best": 0.8, "best-half": 0.6, "mean": 0.5, "worst": 0.5}),
    (RUN, {"worst-tenth": 0.5, "training-loss": 0.25, "rounds-to": 2, "seconds-to": 4.0}),
    (RUN, {"megabytes-to": 600 / 4 / 1e6, "gradients-to": 60, "seconds-round": 2.0}),
    (RUN, {"gradients": 120, "bits": 8 * 4 * 300, "bytes-down": 100, "bytes-up": 50}),
    (RUN, {"exchanges": 1, "deployed-seconds": PHONES}),
    (RUN, {"best-participants": None, "clients": None, "ensemble": None}),
    (LOW, dict.fromkeys(("rounds-to", "seconds-to", "megabytes-to", "gradients-to"))),
    (LONG, {"best-half": 0.9, "last5": 0.46, "mean": 3.2 / 6, "ensemble": 0.7, "worst": 0}),
    # three of 39 clients; phones wait for the largest messages
    (LONG, {"worst-tenth": 0.01, "deployed-seconds": PHONES + 2e-4 / 0.75}),
    (UNLIKE, {"deployed-seconds": PHONES + 7 * (0.75 - 0.5) * 1.5}),  # and for the slowest client
    (TESTED, {"best-participants": 0.7, "clients": 0.5}),
    (PROBED, {"bytes-down": 120, "exchanges": 2, "deployed-seconds": PHONES + 7 * 0.25}),
    (KEPT, {"rounds-to": 2, "seconds-to": None, "megabytes-to": None, "gradients-to": None}),
    (PROBED, {"rounds-to": 1}),  # where it is met
    # what attempts at a round cost that failed
    (AGAIN, {"bits": 8 * 600, "megabytes-to": 600 / 4 / 1e6, "seconds-to": 5, "bytes-down": 100}),
    (AGAIN, {"deployed-seconds": 3 * PHONES - 2 * 0.5}),
    (RunRecord("A", "A", 1, {**DEFAULTS}, 4, {}), dict.fromkeys(metrics.METRICS)),
]


@pytest.mark.parametrize(("run", "values"), VALUES)
def test_each_metric_is_what_its_meaning_says(
    run: RunRecord, values: dict[str, float | None]
) -> None:
    for name, value in values.items():
        got = figures(run)[name]
        assert got == (None if value is None else pytest.approx(value, abs=1e-9)), name


def test_each_seed_is_beside_its_own_of_the_first_method() -> None:
    """One that the first method does not have is left out."""
    first = [made([0.4], seed=1), made([0.6], seed=2, bytes_down={0: 110, 1: 130})]
    more = [made([0.4], seed=s, bytes_down={0: 130, 1: 150}) for s in (1, 2, 3)]
    probed = replace(PROBED, label="C")
    more = [replace(run, label="B") for run in more]
    each = metrics.of_runs([*first, *more, probed], "A")["bytes-beside"]
    assert each["A"].tolist() == [0, 0]
    assert each["B"].tolist() == pytest.approx([40, 20, np.nan], nan_ok=True)
    assert each["C"].tolist() == [20]
    beside = [name for name, metric in metrics.METRICS.items() if metric.beside]
    assert metrics.of_runs([RUN], "B")[beside].isna().all(axis=None)  # it has no run at all
