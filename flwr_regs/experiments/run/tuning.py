"""What tuning chooses: for each method the best of its points on held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from flwr_regs.experiments.experiment import Experiment, Panel, trial_label
from flwr_regs.experiments.report.metrics import last
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.space import Point, shown


def chosen(experiment: Experiment, panel: Panel, records: Iterable[RunRecord]) -> dict[str, Point]:
    """Return label -> the point with the highest mean of the last five rounds on held-out data.

    A point of which a run diverged is not chosen. RuntimeError if a method has no other.
    """
    best, records = {}, [*records]
    for label, row in experiment.rows_of(panel).items():
        tried = experiment.points_of(row)
        scores = []
        for point in tried:
            of_point = [r for r in records if r.label == trial_label(label, point)]
            good = of_point and not any(r.error for r in of_point)
            scores.append(float(np.mean([last(r) for r in of_point])) if good else -1.0)
        if max(scores) < 0:
            raise RuntimeError(f"{label}: every one of its {len(scores)} trials failed or diverged")
        best[label] = tried[int(np.argmax(scores))]
    return best


def notes(experiment: Experiment, panel: Panel, best: Mapping[str, Point]) -> list[str]:
    """Say what tuning chose, and where that is at the edge of what was tried."""
    said = []
    for label, point in best.items():
        tried = experiment.points_of(experiment.rows_of(panel)[label])
        text = shown(point, " = ") or "nothing to tune"
        said.append(f"{label}: {text}; the best of {len(tried)} on held-out data")
        for key, value in point.items():
            every = [other[key] for other in tried if type(other[key]) in (int, float)]
            if len(every) == len(tried) > 2 and value in (min(every), max(every)):
                said[-1] += f" ({key} is at the edge of what was tried)"
    return said
