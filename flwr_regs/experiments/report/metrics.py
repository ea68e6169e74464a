"""What papers report of a run: see :data:`METRICS`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flwr_regs.experiments.report.rows import figures, mean
from flwr_regs.experiments.report.run_records import RunRecord


class Metric(NamedTuple):
    """A figure of a run.

    Attributes
    ----------
    meaning : str
    unit : str
        ``%`` (the number is a fraction, shown in per cent), or what is counted.
    beside : bool
        Whether the first method's number is subtracted, seed by seed.
    """

    meaning: str
    unit: str = "%"
    beside: bool = False


METRICS: dict[str, Metric] = {
    "final": Metric("accuracy after the last round"),
    "last5": Metric("mean accuracy of the last five rounds"),
    "best": Metric("best accuracy"),
    "best-half": Metric("best accuracy in the first half of the rounds"),
    "mean": Metric("mean accuracy over the rounds"),
    "best-participants": Metric("best mean over the clients' own test accuracies (BMTA)"),
    "clients": Metric("mean over the clients' own test accuracies after the last round"),
    "ensemble": Metric("accuracy of the last models' mean prediction"),
    "worst": Metric("accuracy of the worst client"),
    "worst-tenth": Metric("mean accuracy of the worst tenth of the clients"),
    "training-loss": Metric("mean training loss in the last round", "loss"),
    "rounds-to": Metric("rounds to the target accuracy", "rounds"),
    "seconds-to": Metric("seconds to the target accuracy", "s"),
    "megabytes-to": Metric("10^6 bytes a client to the target accuracy", "MB"),
    "gradients-to": Metric("gradient evaluations to the target accuracy", "gradients"),
    "seconds-round": Metric("mean seconds of a round", "s"),
    "deployed-seconds": Metric(
        "estimated seconds of a round on phones (Field Guide, Eqs. 9, 10)", "s"
    ),
    "gradients": Metric("gradient evaluations of the whole run, all clients", "gradients"),
    "bits": Metric("bits communicated, both ways, all clients, the whole run", "bits"),
    "bytes-down": Metric("bytes that a client receives in a turn", "bytes"),
    "bytes-up": Metric("bytes that a client sends in a turn", "bytes"),
    "bytes-beside": Metric(
        "bytes that a client receives in a turn beyond the first method's", "bytes", beside=True
    ),
    "exchanges": Metric("exchanges of a round", "exchanges"),
}
"""Name -> metric, as a card names it; :func:`flwr_regs.experiments.report.rows.figures` has a run's."""


def mean_and_spread(
    name: str, runs: Sequence[RunRecord], first: Sequence[RunRecord] = ()
) -> tuple[float | None, float | None, int]:
    """Return (mean, sample standard deviation, number) of a metric over the runs that ended and have it.

    `first` are the first method's runs, for a metric beside it. The standard deviation of fewer than two is
    None.
    """
    beside = METRICS[name].beside
    base = {run.seed: figures(run)[name] if beside else 0.0 for run in first or runs}
    values = []
    for run in runs:
        value, less = figures(run)[name] if run.whole else None, base.get(run.seed)
        if value is not None and less is not None:
            values.append(value - less)
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return mean(values), deviation, len(values)


def shown(name: str, value: float | None, spread: float | None = None) -> str:
    """Return a metric's cell: accuracies in per cent."""
    if value is None:
        return "–"

    def cell(x: float) -> str:
        if METRICS[name].unit == "%":
            return f"{100 * x:.2f}"
        return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"

    return cell(value) + ("" if spread is None else f" ± {cell(spread)}")
