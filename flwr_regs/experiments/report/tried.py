"""What tuning tried, in tables and pictures: how far the best point is from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from flwr_regs.experiments.report import plots
from flwr_regs.experiments.report.drawing import Look, Picture
from flwr_regs.experiments.report.metrics import last
from flwr_regs.experiments.report.results import Results
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.space import Point, shown


def table(tried: Sequence[RunRecord]) -> pd.DataFrame:
    """Return a row for each point of each method and each number of rounds that it was trained for.

    A method's longest trainings come first, the best of equally long ones in front, so that a point's first
    row is its last word. The columns are ``label``, ``point``, ``rounds``, ``accuracy`` in per cent, the
    mean of the last five rounds over the tuning seeds (NaN: one diverged), and each key that was tuned, NaN
    where a method has it not.
    """
    rows = []
    for run in tried:
        row = {"label": run.row, "point": shown(run.point), "rounds": run.job["rounds"]}
        row["accuracy"] = 100 * last(run) if run.whole else np.nan
        tuned = {k: v if type(v) in (int, float) else str(v) for k, v in run.point.items()}
        rows.append(row | tuned)
    equal = pd.DataFrame(rows).groupby(["label", "point", "rounds"], sort=False)
    accuracy = equal["accuracy"].agg(lambda of_seeds: of_seeds.mean(skipna=False)).round(9)
    points = equal.first().assign(accuracy=accuracy).reset_index()
    order = ["label", "rounds", "accuracy"]
    return points.sort_values(order, ascending=[True, False, False], ignore_index=True)


def pictures(
    tried: Sequence[RunRecord], chosen: Mapping[str, Point], look: Look
) -> dict[str, Picture]:
    """Return ``tuning``, a map of what was tried for each method, and ``tuning-gap``.

    The methods come in the order of the `chosen` points, which is that of the rows, as in the other
    pictures; of equally good points, the chosen one is the best. The latter picture has each method's curve
    on held-out data at its best point, in a band that reaches to the second best (Wang et al. 2021, Figs. 1
    and 3).
    """
    how: Any = {"title": Results(tried).title, "look": look}
    best, seeds, order = [], dict[str, int](), [*chosen]
    tried = sorted(tried, key=lambda run: run.point != chosen.get(run.row))
    of_points = table(tried).sort_values("label", key=lambda of: of.map(order.index), kind="stable")
    drawn = {"tuning": plots.over_points(of_points, **how)}
    ended = of_points.drop_duplicates(["label", "point"]).dropna(subset="accuracy")
    for label, rows in ended.groupby("label", sort=False):
        for place, row in enumerate(rows.head(2).to_dict("records")):
            of_point = [r for r in tried if (r.row, shown(r.point)) == (label, row["point"])]
            several = [run for run in of_point if run.job["rounds"] == row["rounds"]]
            seeds[label] = len(several)
            points = Results(several)._points()
            mean = points[points["part"] != "filled"].groupby("round").mean(numeric_only=True)
            best.append(mean.reset_index().assign(label=label, seed=place, part="whole"))
    if best:
        how |= {"kind": "held-out", "seeds": seeds, "labels": order}
        drawn["tuning-gap"] = plots.over_rounds(pd.concat(best), **how)
    return drawn
