"""Rows of a table from runs: means over seeds, bytes, compute, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flwr_regs.experiments.report.run_records import RunRecord

LAST = 5
"""Accuracies are means over this many last rounds, so that one lucky round counts less."""
COLLAPSE = 0.1
"""A run has collapsed if its last rounds' mean is this far below its best mean of as many rounds."""
COUNTED = ("diverged", "failed", "unfinished", "collapsed", "reached", "failures")
SPREAD = ("last5", "final", "best", "worst_client", "spread")
MEANS = (
    *("rounds_to_target", "mb_to_target", "mb", "mb_down", "mb_up", "seconds"),
    "processor_seconds",
)
SOME = ("epsilon", "delta", "clipped", "own", "personal")
"""Figures that a row has only where its runs have them."""


def rows(runs: Sequence[RunRecord], target: float, baseline: str = "") -> list[dict[str, Any]]:
    """Return a row for each label, in order.

    Accuracies are fractions, means over the seeds that ran to their end, ``..._std`` their sample standard
    deviations (None for one seed).

    method, n, diverged, failed, unfinished, collapsed
        The label, its seeds, and those of them that diverged, failed, have not ended yet, or collapsed.
    last5, final, best
        The mean of the last five rounds, the last round, the best round.
    rounds_to_target, reached
        The mean of the first rounds at or above the target, over the seeds that reach it; how many do.
    worst_client, spread
        The lowest of the clients' accuracies with the final model, and their standard deviation.
    mb, mb_down, mb_up, mb_to_target
        10^6 bytes per client of the population: of the whole run both ways, and until the target; of a
        client's average turn, down and up.
    seconds, processor_seconds
        Of a run.
    failures
        Replies that were rejected, over all seeds.
    last5_interval, difference, difference_interval
        With a `baseline` (a label): half the width of the 95 % interval of ``last5`` (Student's t over
        seeds); the mean paired difference of ``last5`` to the baseline on the same seeds, and its interval.
    epsilon, delta, clipped, own, personal
        Where there is privacy: what it spent, and the share of clipped updates. Where models were
        personalised: the mean accuracy on the clients' own data, of the global model and of theirs.
    """
    import pandas as pd

    labels, seeds = [run.label for run in runs], [run.seed for run in runs]
    figures = [_figures(run, target) for run in runs]
    numbers = pd.DataFrame(figures, columns=[*COUNTED, *SPREAD, *MEANS, *SOME], dtype=float)
    groups = numbers.groupby(labels, sort=False)
    means, deviations, sums = groups.mean(), groups.std(), groups.sum()
    ends = pd.Series(numbers["last5"].to_numpy(), [labels, seeds]).unstack()
    table = []
    for label in dict.fromkeys(labels):
        row: dict[str, Any] = {"method": label, "n": labels.count(label)}
        row |= {name: int(sums[name][label]) for name in COUNTED}
        some = [name for name in SOME if not np.isnan(means[name][label])]
        row |= {name: _or_none(means[name][label]) for name in (*SPREAD, *MEANS, *some)}
        row |= {f"{name}_std": _or_none(deviations[name][label]) for name in SPREAD}
        if baseline:
            paired = (ends.loc[label] - ends.loc[baseline]).dropna().tolist()
            paired = [] if label == baseline else paired
            row["last5_interval"] = interval(ends.loc[label].dropna().tolist())
            row["difference"], row["difference_interval"] = mean(paired), interval(paired)
        table.append(row)
    return table


def by_label(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Return label -> its runs, in order."""
    return {
        label: [r for r in runs if r.label == label]
        for label in dict.fromkeys(r.label for r in runs)
    }


def _figures(run: RunRecord, target: float) -> dict[str, float | None]:
    """Return one run's figures; None, or nothing, where it has none."""
    reached = first_at(run.trained, target)
    figures: dict[str, float | None] = {
        "diverged": run.diverged,
        "failed": bool(run.error) and not run.diverged,
        "unfinished": not run.ended and not run.error,
        "failures": run.rejected,
        "reached": reached is not None,
        "rounds_to_target": reached,
        "mb_to_target": run.megabytes[reached - 1] if reached else None,
    }
    if run.rounds:
        for name, ways in (("mb_down", ("bytes_down", "bytes_ahead")), ("mb_up", ("bytes_up",))):
            figures[name] = (bytes_of_a_turn(run, *ways) or 0.0) / 1e6
        if "clipped" in run.rounds[-1]:
            figures |= {name: run.rounds[-1].get(name) for name in ("epsilon", "delta")}
            figures["clipped"] = float(np.mean([entry["clipped"] for entry in run.rounds]))
    if run.whole:
        figures |= {
            "collapsed": collapsed(run),
            "last5": last(run),
            "final": run.accuracy[-1],
            "best": max(run.accuracy),
            "worst_client": run.per_client.get("worst"),
            "spread": run.per_client.get("std"),
            "mb": run.megabytes[-1] if run.rounds else None,
            "seconds": run.seconds,
            "processor_seconds": run.processor_seconds,
        }
        if run.job["personalise"] and (tested := [*tests_of_clients(run)]):
            for name, metric in (("own", "accuracy"), ("personal", "personal-accuracy")):
                figures[name] = float(np.mean([client[metric] for client in tested]))
    return figures


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def tests_of_clients(run: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield what each client tested after the last round."""
    if run.rounds:
        yield from run.rounds[-1].get("evaluate", {}).get("clients", {}).values()


def first_at(tests: Sequence[dict[str, Any]], target: float) -> int | None:
    """Return the first round whose test is at or above the target; None if there is none."""
    return next((test["round"] for test in tests if test["accuracy"] >= target), None)


def last(run: RunRecord) -> float:
    """Return the mean accuracy of a run's last five rounds, or of as many as it has."""
    return float(np.mean(run.accuracy[-LAST:]))


def collapsed(run: RunRecord) -> bool:
    """Return whether a run ends far below its best: see :data:`COLLAPSE`."""
    several = min(LAST, (len(run.accuracy) + 1) // 2)  # a short run can collapse too
    means = np.convolve(run.accuracy, np.ones(several) / several, "valid")
    return bool(means.max() - means[-1] > COLLAPSE)


def warnings(runs: Sequence[RunRecord]) -> list[str]:
    """Say which methods diverged, failed, collapsed or had replies rejected: a sentence each."""
    sentences = []
    for label, of_label in by_label(runs).items():
        seeds = f"{len(of_label)} seed{'s' * (len(of_label) > 1)}"
        for what, bad in (
            ("diverged", [r for r in of_label if r.diverged]),
            ("failed", [r for r in of_label if r.error and not r.diverged]),
            ("unfinished, in no mean", [r for r in of_label if not r.ended and not r.error]),
        ):
            if bad:
                sentences.append(
                    f"{label}: {len(bad)} of {seeds} {what}; seed {bad[0].seed}: "
                    f"{bad[0].stopped[:160]}"
                )
        whole = [r for r in of_label if r.whole]
        if fallen := [r for r in whole if collapsed(r)]:
            run = fallen[0]
            best = max(run.trained, key=lambda test: float(test["accuracy"]))
            sentences.append(
                f"{label}: {len(fallen)} of {seeds} collapsed; seed {run.seed} ends at "
                f"{run.accuracy[-1]:.1%}, its best was {best['accuracy']:.1%} in round {best['round']}"
            )
        logged = dict.fromkeys(text for r in of_label for text in r.warnings)
        logged |= dict.fromkeys(
            e["divergence"] for r in whole for e in r.rounds if "divergence" in e
        )
        sentences += [f"{label}: {text}" for text in [*logged][:2]]
        if rejecting := [r for r in whole if r.rejected]:
            entry = next(e for e in rejecting[0].rounds if e.get("failures"))
            pid, why = next(iter(entry["failures"].items()))
            sentences.append(
                f"{label}: {sum(r.rejected for r in whole)} replies were rejected, the first in round "
                f"{entry['round']} of seed {rejecting[0].seed}: client {pid}: {why[:120]}"
            )
    return sentences


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of nothing."""
    return float(np.mean(values)) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation; None of fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def interval(values: Sequence[float]) -> float | None:
    """Return half the width of the mean's 95 % interval (Student's t); None of fewer than two values."""
    from scipy import stats

    if len(values) < 2:
        return None
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def bytes_of_a_turn(run: RunRecord, *ways: str) -> float | None:
    """Return the bytes of a client's average turn, such as ``bytes_down``."""
    sent = [b for way in ways for r in run.rounds for b in r.get(way, {}).values()]
    turns = sum(len(r.get(ways[0], {})) for r in run.rounds)
    return float(sum(sent)) / turns if turns else None
