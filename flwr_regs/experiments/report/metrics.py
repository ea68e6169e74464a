"""What papers report of a run, computed from its recorded history: see :data:`METRICS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flwr_regs.experiments.report import rows
from flwr_regs.experiments.report.run_records import RunRecord

DOWN_MB, UP_MB, SLOWER, FIXED_SECONDS = 0.75, 0.25, 7.0, 10.0
"""The Field Guide's model of a round on phones (Wang et al. 2021, Sec. 5.4, Eqs. 9 and 10): MB a second
down and up, how much slower a phone is than the simulation, and seconds that a client takes beside."""


@dataclass(frozen=True)
class Metric:
    """A number of a run.

    Attributes
    ----------
    meaning : str
    of : callable
        The run's number; None if its history does not have it.
    unit : str
        ``%`` (the number is a fraction, shown in per cent), or what is counted.
    beside : bool
        Whether the first method's number is subtracted, seed by seed.
    """

    meaning: str
    of: Callable[[RunRecord], float | None]
    unit: str = "%"
    beside: bool = False


def best(run: RunRecord, share: float = 1.0) -> float | None:
    """Return the best accuracy in this share of the planned rounds, from the first on."""
    last = run.job["rounds"] * share
    return max((t["accuracy"] for t in run.trained if t["round"] <= last), default=None)


def training_loss(run: RunRecord) -> float | None:
    """Return the mean training loss for one example over the last round."""
    metrics = [e["train_metrics"] for e in run.rounds if "train_metrics" in e]
    return metrics[-1].get("train-loss") if metrics else None


def rounds_to(run: RunRecord) -> float | None:
    """Return the first round at or above ``target-accuracy``; None if there is none."""
    return rows.first_at(run.trained, run.job["target-accuracy"])


def worst_share(run: RunRecord, share: float) -> float | None:
    """Return the mean accuracy of the worst share of the clients, at least one, with the final model."""
    each = sorted(run.per_client.get("clients", ()))
    return rows.mean(each[: max(int(len(each) * share), 1)])


def deployed_seconds(run: RunRecord) -> float | None:
    """Return the estimated seconds of a mean round on phones, by the Field Guide's Eqs. 9 and 10.

    The simulation's time of a client is the round's ``clients`` phase divided by its cohort.
    """
    each = []
    for entry in run.rounds:
        seconds, cohort = entry.get("seconds", {}), entry.get("cohort", ())
        if "clients" not in seconds or not cohort:
            continue
        down, up = (
            max(entry.get(way, {0: 0}).values(), default=0) / 1e6
            for way in ("bytes_down", "bytes_up")
        )
        trained = (seconds["clients"] + seconds.get("probe", 0.0)) / len(cohort)
        computed = SLOWER * trained + FIXED_SECONDS + seconds.get("aggregate", 0.0)
        each.append(down / DOWN_MB + up / UP_MB + computed)
    return rows.mean(each)


def _tested(run: RunRecord) -> list[float]:
    """Return each tested round's mean over its clients: of a client's own model where it has one."""
    entries = [e.get("evaluate", {}).get("clients", {}).values() for e in run.rounds]
    return [
        float(np.mean([c.get("personal-accuracy", c["accuracy"]) for c in clients]))
        for clients in entries
        if clients
    ]


def _at_target(of: Callable[[RunRecord], list[float]]) -> Callable[[RunRecord], float | None]:
    def value(run: RunRecord) -> float | None:
        reached = rounds_to(run)
        return None if reached is None else of(run)[int(reached) - 1]

    return value


def _processed(run: RunRecord) -> list[float]:
    return [float(n) for n in np.cumsum([e.get("examples_processed", 0) for e in run.rounds])]


def _tests(name: str) -> Callable[[RunRecord], float | None]:
    return lambda run: run.trained[-1].get(name) if run.trained else None


def _received(run: RunRecord) -> float | None:
    return rows.bytes_of_a_turn(run, "bytes_down", "bytes_ahead")


def _exchanges(run: RunRecord) -> float | None:
    return rows.mean([2.0 if entry.get("bytes_probe_down") else 1.0 for entry in run.rounds])


METRICS: dict[str, Metric] = {
    "final": Metric("accuracy after the last round", _tests("accuracy")),
    "last5": Metric(
        "mean accuracy of the last five rounds", lambda r: rows.last(r) if r.trained else None
    ),
    "best": Metric("best accuracy", best),
    "best-half": Metric("best accuracy in the first half of the rounds", lambda r: best(r, 0.5)),
    "mean": Metric("mean accuracy over the rounds", lambda r: rows.mean(r.accuracy)),
    "best-participants": Metric(
        "best mean over the clients' own test accuracies (BMTA)",
        lambda r: max(_tested(r), default=None),
    ),
    "clients": Metric(
        "mean over the clients' own test accuracies after the last round",
        lambda r: next(reversed(_tested(r)), None),
    ),
    "ensemble": Metric("accuracy of the last models' mean prediction", _tests("ensemble")),
    "worst": Metric("accuracy of the worst client", lambda r: worst_share(r, 0.0)),
    "worst-tenth": Metric(
        "mean accuracy of the worst tenth of the clients", lambda r: worst_share(r, 0.1)
    ),
    "training-loss": Metric("mean training loss in the last round", training_loss, "loss"),
    "rounds-to": Metric("rounds to the target accuracy", rounds_to, "rounds"),
    "seconds-to": Metric("seconds to the target accuracy", _at_target(lambda r: r.clock), "s"),
    "megabytes-to": Metric(
        "10^6 bytes a client to the target accuracy", _at_target(lambda r: r.megabytes), "MB"
    ),
    "gradients-to": Metric(
        "gradient evaluations to the target accuracy", _at_target(_processed), "gradients"
    ),
    "seconds-round": Metric(
        "mean seconds of a round", lambda r: r.clock[-1] / len(r.rounds) if r.rounds else None, "s"
    ),
    "deployed-seconds": Metric(
        "estimated seconds of a round on phones (Field Guide, Eqs. 9, 10)", deployed_seconds, "s"
    ),
    "gradients": Metric(
        "gradient evaluations of the whole run, all clients",
        lambda r: next(reversed(_processed(r)), None),
        "gradients",
    ),
    "bits": Metric(
        "bits communicated, both ways, all clients, the whole run",
        lambda r: 8e6 * r.megabytes[-1] * r.clients if r.rounds else None,
        "bits",
    ),
    "bytes-down": Metric("bytes that a client receives in a turn", _received, "bytes"),
    "bytes-up": Metric(
        "bytes that a client sends in a turn",
        lambda r: rows.bytes_of_a_turn(r, "bytes_up"),
        "bytes",
    ),
    "bytes-beside": Metric(
        "bytes that a client receives in a turn beyond the first method's",
        _received,
        "bytes",
        beside=True,
    ),
    "exchanges": Metric("exchanges of a round", _exchanges, "exchanges"),
}
"""Name -> metric, as a card names it."""


def mean_and_spread(
    name: str, runs: Sequence[RunRecord], first: Sequence[RunRecord] = ()
) -> tuple[float | None, float | None, int]:
    """Return (mean, sample standard deviation, number) of a metric over the runs that ended and have it.

    `first` are the first method's runs, for a metric beside it. The standard deviation of fewer than two is
    None.
    """
    metric = METRICS[name]
    base = {run.seed: metric.of(run) if metric.beside else 0.0 for run in first or runs}
    values = []
    for run in runs:
        value, less = metric.of(run) if run.whole else None, base.get(run.seed)
        if value is not None and less is not None:
            values.append(float(value) - less)
    return rows.mean(values), rows.deviation(values), len(values)


def shown(name: str, value: float | None, spread: float | None = None) -> str:
    """Return a metric's cell: accuracies in per cent."""
    if value is None:
        return "–"

    def cell(x: float) -> str:
        if METRICS[name].unit == "%":
            return f"{100 * x:.2f}"
        return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"

    return cell(value) + ("" if spread is None else f" ± {cell(spread)}")
