"""What a card's experiment gave, beside what its source reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flwr_regs.experiments.experiment import Experiment
from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report.results import Results
from flwr_regs.experiments.report.terminal import columns


def report_rows(card: Experiment, results: Sequence[Results]) -> list[dict[str, Any]]:
    """Return a row for each panel, method and metric: ours, and what the source reports.

    `results` are those of the panels, in order. Accuracies are fractions; the source's too. ``n`` of the
    `seeds` that are not unfinished have a value.
    """
    names = ("panel", "method", "metric", "value", "std", "n", "seeds")
    rows = []
    for panel, of_panel in zip(card.panels, results, strict=True):
        labels = card.rows_of(panel)
        each = metrics.of_runs(of_panel.runs, next(iter(labels))).groupby(level="label")
        seeds = Counter(run.label for run in of_panel.runs if run.status != "unfinished")
        means = each[[*card.metrics]].agg(["mean", "std", "count"]).reindex([*labels])
        for label, row in labels.items():
            for metric in card.metrics:
                *ours, n = (None if x != x else x for x in means.loc[label, metric])
                scale = 0.01 if metrics.METRICS[metric].unit == "%" else 1.0
                reported = panel.reports.get(metric, {}).get(row.name, [])
                theirs = reported if isinstance(reported, list) else [reported]
                source = [*(scale * value for value in theirs), None, None]
                cells = (panel.name, row.name, metric, *ours, int(n or 0), seeds[label])
                rows.append(dict(zip(names, cells, strict=True)))
                rows[-1] |= {"source_value": source[0], "source_std": source[1]}
    return rows


def as_text(card: Experiment, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the report for a terminal: a line for each method of a panel, the source's in brackets."""
    lines = [f"{card.title} ({card.source}, {card.where}); in brackets what the source reports"]
    for panel in card.panels:
        methods: dict[str, list[str]] = {"": [*card.metrics]}
        for row in rows:
            if row["panel"] == panel.name:
                methods.setdefault(row["method"], []).append(_cell(row))
        lines += ["", panel.name]
        lines += columns([[name, *cells] for name, cells in methods.items()], right=True)
        lines += [f"NOTE: {note}" for note in panel.notes]
    lines += ["", *(f"{m}: {metrics.METRICS[m].meaning}" for m in card.metrics)]
    lines += ["±: standard deviation over the seeds"] * any(row["std"] is not None for row in rows)
    some = any(0 < row["n"] < row["seeds"] for row in rows)
    lines += ["(2 of 3): the mean of the 2 seeds of 3 that have a value"] * some
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[str, Any]) -> str:
    name = row["metric"]
    ours = metrics.shown(name, row["value"], row["std"])
    if 0 < row["n"] < row["seeds"]:  # as the table says how many reach the target
        ours += f" ({row['n']} of {row['seeds']})"
    if row["source_value"] is None:
        return ours
    return f"{ours} [{metrics.shown(name, row['source_value'], row['source_std'])}]"
