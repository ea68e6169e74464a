"""Rows of a table from runs: means over seeds, bytes, compute, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flwr_regs.experiments.report.run_records import Run

LAST = 5
"""Accuracies are means over this many last rounds, so that one lucky round counts less."""
COLLAPSE = 0.1
"""A run has collapsed if its last rounds' mean is this far below its best mean of as many rounds."""


def rows(runs: Sequence[Run], target: float, baseline: str = "") -> list[dict[str, Any]]:
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
    """
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    found = [_row(label, mine, target) for label, mine in by_label.items()]
    if baseline:
        known = {r.seed: last(r) for r in by_label[baseline] if r.whole}
        for row, mine in zip(found, by_label.values(), strict=True):
            whole = [r for r in mine if r.whole]
            paired = [last(r) - known[r.seed] for r in whole if r.seed in known]
            row["last5_interval"] = interval([last(r) for r in whole])
            row["difference"] = None if row["method"] == baseline else mean(paired)
            row["difference_interval"] = None if row["method"] == baseline else interval(paired)
    return found


def _row(label: str, runs: Sequence[Run], target: float) -> dict[str, Any]:
    whole = [r for r in runs if r.whole]
    reached = [(t, r) for r in runs if (t := first_at(r.trained, target)) is not None]
    row: dict[str, Any] = {
        "method": label,
        "n": len(runs),
        "diverged": sum(r.diverged for r in runs),
        "failed": sum(bool(r.error) and not r.diverged for r in runs),
        "unfinished": sum(not r.ended and not r.error for r in runs),
        "collapsed": sum(collapsed(r) for r in whole),
    }
    for name, values in (
        ("last5", [last(r) for r in whole]),
        ("final", [r.accuracy[-1] for r in whole]),
        ("best", [max(r.accuracy) for r in whole]),
        ("worst_client", [r.per_client["worst"] for r in whole if "worst" in r.per_client]),
        ("spread", [r.per_client["std"] for r in whole if "std" in r.per_client]),
    ):
        row[name], row[f"{name}_std"] = mean(values), deviation(values)
    row |= {
        "rounds_to_target": mean([t for t, _ in reached]),
        "mb_to_target": mean([r.megabytes[t - 1] for t, r in reached]),
        "reached": len(reached),
        "mb": mean([r.megabytes[-1] for r in whole]),
        "mb_down": mean([_turn(r, "bytes_down", "bytes_ahead") for r in runs if r.rounds]),
        "mb_up": mean([_turn(r, "bytes_up") for r in runs if r.rounds]),
        "seconds": mean([r.seconds for r in whole]),
        "processor_seconds": mean(
            [r.processor_seconds for r in whole if r.processor_seconds is not None]
        ),
        "failures": sum(r.rejected for r in runs),
    }
    return row | _private(runs) | _personal(whole)


def first_at(tests: Sequence[dict[str, Any]], target: float) -> int | None:
    """Return the first round whose test is at or above the target; None if there is none."""
    return next((test["round"] for test in tests if test["accuracy"] >= target), None)


def last(run: Run) -> float:
    """Return the mean accuracy of a run's last five rounds, or of as many as it has."""
    return float(np.mean(run.accuracy[-LAST:]))


def collapsed(run: Run) -> bool:
    """Return whether a run ends far below its best: see :data:`COLLAPSE`."""
    several = min(LAST, (len(run.accuracy) + 1) // 2)  # a short run can collapse too
    means = np.convolve(run.accuracy, np.ones(several) / several, "valid")
    return bool(means.max() - means[-1] > COLLAPSE)


def warnings(runs: Sequence[Run]) -> list[str]:
    """Say which methods diverged, failed, collapsed or had replies rejected: a sentence each."""
    said = []
    for label in dict.fromkeys(run.label for run in runs):
        mine = [r for r in runs if r.label == label]
        for what, bad in (
            ("diverged", [r for r in mine if r.diverged]),
            ("failed", [r for r in mine if r.error and not r.diverged]),
            ("unfinished, in no mean", [r for r in mine if not r.ended and not r.error]),
        ):
            if bad:
                said.append(
                    f"{label}: {len(bad)} of {_seeds(len(mine))} {what}; seed {bad[0].seed}: "
                    f"{bad[0].stopped[:160]}"
                )
        whole = [r for r in mine if r.whole]
        if fallen := [r for r in whole if collapsed(r)]:
            r = fallen[0]
            best = max(r.trained, key=lambda test: float(test["accuracy"]))
            said.append(
                f"{label}: {len(fallen)} of {_seeds(len(mine))} collapsed; seed {r.seed} ends at "
                f"{r.accuracy[-1]:.1%}, its best was {best['accuracy']:.1%} in round {best['round']}"
            )
        told = dict.fromkeys(text for r in mine for text in r.warnings)
        told |= dict.fromkeys(e["divergence"] for r in whole for e in r.rounds if "divergence" in e)
        said += [f"{label}: {text}" for text in [*told][:2]]
        if count := sum(r.rejected for r in whole):
            first = next(r for r in whole if r.rejected)
            entry = next(e for e in first.rounds if e.get("failures"))
            pid, why = next(iter(entry["failures"].items()))
            said.append(
                f"{label}: {count} replies were rejected, the first in round {entry['round']} of seed "
                f"{first.seed}: client {pid}: {why[:120]}"
            )
    return said


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count > 1)}"


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of nothing."""
    return float(np.mean(values)) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation; None of fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def interval(values: Sequence[float]) -> float | None:
    """Return half the width of the mean's 95 % interval (Student's t); None of fewer than two values."""
    from scipy.stats import t

    spread = deviation(values)
    if spread is None:
        return None
    return float(t.ppf(0.975, len(values) - 1) * spread / len(values) ** 0.5)


def _turn(run: Run, *ways: str) -> float:
    """Return the megabytes of a client's average turn."""
    sent = [b for way in ways for r in run.rounds for b in r.get(way, {}).values()]
    turns = sum(len(r.get(ways[0], {})) for r in run.rounds)
    return float(sum(sent)) / max(turns, 1) / 1e6


def _private(runs: Sequence[Run]) -> dict[str, Any]:
    """Return epsilon, delta and the share of the updates that were clipped, where there are any."""
    private = [r for r in runs if r.rounds and "clipped" in r.rounds[-1]]
    if not private:
        return {}
    ends = [r.rounds[-1] for r in private]
    return {
        "epsilon": mean([e["epsilon"] for e in ends if e.get("epsilon") is not None]),
        "delta": ends[0].get("delta"),
        "clipped": mean([float(np.mean([e["clipped"] for e in r.rounds])) for r in private]),
    }


def _personal(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the mean accuracy of the global and of the personalised models on the clients' own data."""
    found: dict[str, list[float]] = {"accuracy": [], "personal-accuracy": []}
    for run in runs:
        clients = (
            run.rounds[-1].get("evaluate", {}).get("clients", {}).values() if run.rounds else ()
        )
        for metric, values in found.items():
            if clients and run.job["personalise"]:
                values.append(float(np.mean([c[metric] for c in clients])))
    own, personal = map(mean, found.values())
    return {} if own is None else {"own": own, "personal": personal}


def with_own_models(runs: Sequence[Run]) -> list[str]:
    """Return the labels of the methods whose clients test models of their own."""
    tested = {
        run.label: run.rounds[-1].get("evaluate", {}).get("clients", {})
        for run in runs
        if run.rounds
    }
    return [
        label
        for label, clients in tested.items()
        if any("personal-accuracy" in found for found in clients.values())
    ]
