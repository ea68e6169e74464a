"""Figures of a run, such as papers report (:data:`METRICS`), and rows of a table: means over seeds.

Also what went wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flwr_regs.experiments.calls import REFERENCES
from flwr_regs.experiments.extras import table_beside
from flwr_regs.experiments.report.run_records import RunRecord, attempts

if TYPE_CHECKING:
    import pandas as pd

LAST = 5
"""Accuracies are means over this many last rounds, so that one lucky round counts less."""
MANY, LITTLE = 10, 0.05
"""A run of so many rounds has not learned if its best accuracy is no more above the untrained one."""
COLLAPSE = 0.1
"""A run has collapsed if its last rounds' mean is this far below its best mean of as many rounds."""
EXPLODED = 10.0
"""A run has also collapsed if its test loss ends at so many times the untrained model's, and above this.

A loss below 1 differs by as much where a model has learned.
"""
ENDS = {
    "diverged": "diverged (they count in the means as {as_what})",
    "failed": "failed",
    "unfinished": "unfinished, and left out of the means",
}
"""How a run stops early -> what is said of a method's seeds."""
FLAWS = {**ENDS, "idle": "never learned", "exploded": "exploded", "collapsed": "collapsed"}
"""What may be wrong with a run -> what is said of a method's seeds."""
COUNTED = (*ENDS, "collapsed", "reached", "failures")
SPREAD = ("last5", "final", "best", "worst_client", "spread")
MEANS: tuple[str, ...] = ("rounds_to_target", "mb_to_target", "mb", "mb_down_turn", "mb_up_turn")
MEANS += ("seconds", "processor_seconds")
OF_ALL = ("last5", "final")
"""Accuracies to which a run that diverged adds the untrained model's: it is not left out."""
TO_TARGET = ("rounds-to", "seconds-to", "megabytes-to", "gradients-to")
"""What a run took to reach the target accuracy, also one that diverged later."""
SOME = ("epsilon", "delta", "clipped", "own", "personal", "averaged")
"""Figures that a row has only where its runs have them."""
DOWN_MB, UP_MB, SLOWER, FIXED_SECONDS = 0.75, 0.25, 7.0, 10.0
"""The Field Guide's model of a round on phones (Wang et al. 2021, Sec. 5.4, Eqs. 9 and 10): MB a second
down and up, how much slower a phone is than the simulation, and seconds that a client takes beside."""


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


METRICS = {name: Metric(**row) for name, row in table_beside(__file__).items()}
"""Name -> metric, as a card names it; :func:`figures` has a run's."""


def rows(
    runs: Sequence[RunRecord], baseline: str = "", interim: bool = False
) -> list[dict[str, Any]]:
    """Return a row for each label, in order; :meth:`Results.table` says what it holds.

    Differences that are `interim` are not tested.
    """
    import pandas as pd

    from flwr_regs.experiments.report import statistics

    numbers = of_runs(runs)
    groups = numbers.groupby(level="label", sort=False)
    means, sums = groups[[*SPREAD, *MEANS, *SOME]].mean(), groups[[*COUNTED]].sum().astype(int)
    deviations = groups[[*SPREAD]].std().add_suffix("_std")
    table = pd.concat([groups.size().rename("n"), sums, means, deviations], axis=1)
    for name in OF_ALL:
        table[f"{name}_interval"] = statistics.half_interval(numbers[name].unstack())
    if baseline:
        untested = {run.label for run in runs} if interim else references(runs)
        by_seed = numbers["last5"].unstack()
        table = table.join(statistics.differences(by_seed, baseline, untested))
    table = table.rename_axis("method").reset_index().astype(object)
    return [
        {name: None if pd.isna(v) else v for name, v in row.items() if name not in SOME or v == v}
        for row in table.to_dict("records")
    ]


def references(runs: Sequence[RunRecord]) -> set[str]:
    """Return the labels that are no methods: clients that train alone, and one model on all their data."""
    return {run.label for run in runs if run.method in REFERENCES}


def of_runs(runs: Sequence[RunRecord], first: str = "") -> pd.DataFrame:
    """Return what each run adds to means, by label and seed: its metrics, and the columns of a table.

    NaN where it has none, or does not count: a run that diverged counts only in the accuracies of
    :data:`OF_ALL` and in :data:`TO_TARGET`, one that stopped in none. With the label of the `first` method,
    its number is subtracted from the metrics beside it, seed by seed.
    """
    import pandas as pd

    index = pd.MultiIndex.from_tuples([(r.label, r.seed) for r in runs], names=("label", "seed"))
    names = dict.fromkeys([*COUNTED, *SPREAD, *MEANS, *SOME, *METRICS])
    table = pd.DataFrame([_counted(run) for run in runs], index, [*names], dtype=float)
    if first:
        beside = [name for name, metric in METRICS.items() if metric.beside]
        of_first = table[index.get_level_values("label") == first]  # perhaps none
        table[beside] = table[beside].sub(of_first[beside].droplevel("label"), level="seed")
    return table


def _counted(run: RunRecord) -> dict[str, Any]:
    """Return what a run adds to means."""
    of_run = figures(run)
    row: dict[str, Any] = {status: run.status == status for status in ENDS}
    row["failures"] = run.rejected
    if run.ended:
        row |= {name: of_run[name] for name in TO_TARGET}
        reached, mb = of_run["rounds-to"], of_run["megabytes-to"]
        row |= {"reached": reached is not None, "rounds_to_target": reached, "mb_to_target": mb}
    if run.rounds:
        row |= {f"mb_{way}_turn": (of_run[f"bytes-{way}"] or 0.0) / 1e6 for way in ("down", "up")}
        if "clipped" in (last_round := run.rounds[-1]):
            row |= {name: last_round.get(name) for name in ("epsilon", "delta")}
            row["clipped"] = mean([entry["clipped"] for entry in run.rounds])
    if run.whole:
        same = ("averaged", "seconds", "processor_seconds")
        row |= of_run | {name: getattr(run, name) for name in same}
        row |= {"worst_client": of_run["worst"], "spread": run.per_client.get("std")}
        row |= {"collapsed": collapsed(run) or exploded(run), "mb": _at(run.megabytes)}
    if run.diverged:
        row |= {name: of_run[name] for name in OF_ALL}
    return row


def figures(run: RunRecord) -> dict[str, float | None]:
    """Return the figures of a run that :data:`METRICS` names; None where its history has none.

    Also ``own`` and ``personal``: the mean accuracy on the clients' data after the last round, of the
    global model and of theirs, where models were personalised.
    """
    trained, accuracy, entries = run.trained, run.accuracy, run.rounds
    target, planned = run.job["target-accuracy"], run.job["rounds"]
    half = [test["accuracy"] for test in trained if test["round"] <= planned / 2]
    reached = next((test["round"] for test in trained if test["accuracy"] >= target - 1e-9), None)
    gradients = np.cumsum([entry.get("examples_processed", 0) for entry in entries]).tolist()
    losses = [e["train_metrics"].get("train-loss") for e in entries if "train_metrics" in e]
    of_clients = [float(np.mean(tests)) for entry in entries if (tests := on_clients(entry))]
    last_tests = tests_of_clients(run) if run.job["personalise"] else []
    each = sorted(a for a in run.per_client.get("clients", ()) if a is not None)
    received = bytes_of_a_turn(run, "bytes_down", "bytes_ahead")
    return {
        "final": run.untrained if run.diverged else _at(accuracy),
        "last5": run.untrained if run.diverged else mean(accuracy[-LAST:]),
        "best": max(accuracy, default=None),
        "best-half": max(half, default=None),
        "mean": mean(accuracy),
        "best-participants": max(of_clients, default=None),
        "clients": _at(of_clients),
        "ensemble": trained[-1].get("ensemble") if trained else None,
        "worst": run.per_client.get("worst"),
        "worst-tenth": mean(each[: max(len(each) // 10, 1)]),
        "training-loss": _at(losses),
        "rounds-to": reached,
        "seconds-to": _at(run.clock, reached),
        "megabytes-to": _at(run.megabytes, reached),
        "gradients-to": _at(gradients, reached),
        "seconds-round": run.clock[-1] / len(entries) if entries else None,
        "deployed-seconds": mean([s for s in deployed_rounds(run) if s == s]),
        "gradients": _at(gradients),
        "bits": 8e6 * run.megabytes[-1] * run.clients if entries else None,
        "bytes-down": received,
        "bytes-up": bytes_of_a_turn(run, "bytes_up"),
        "bytes-beside": received,
        "exchanges": mean([2.0 if entry.get("bytes_probe_down") else 1.0 for entry in entries]),
        "own": mean([client["accuracy"] for client in last_tests]),
        "personal": mean([client["personal-accuracy"] for client in last_tests]),
    }


def tests(run: RunRecord) -> pd.DataFrame:
    """Return a run's rows of :meth:`Results.rounds`."""
    import pandas as pd

    hours = np.cumsum(deployed_rounds(run)) / 3600
    spent = pd.DataFrame({"megabytes": run.megabytes, "seconds": run.clock, "hours": hours})
    spent.index += 1
    spent.loc[0] = 0.0  # the initial model has cost nothing
    points = pd.DataFrame(run.test, columns=["round", "accuracy", "loss"]).astype(float)
    known = len(run.spent) == len(run.test)  # Ctrl-C may come between the two
    points["processor_seconds"] = run.spent if known else np.nan
    points.insert(0, "method", run.label)
    points.insert(1, "seed", run.seed)
    return points.join(spent, on="round")


def _at(values: Sequence[float | None], number: int | None = 0) -> float | None:
    """Return the value of round `number`, or the last one; None if there is none, as of a kept trial."""
    return values[number - 1] if values and number is not None and number <= len(values) else None


def deployed_rounds(run: RunRecord) -> list[float]:
    """Return the estimated seconds of each round on phones, by the Field Guide's Eqs. 9 and 10.

    Eq. 9 waits for the slowest client. Its simulated time is a share of the round's ``clients`` phase: that
    of its local steps, or, where the history has no steps, an equal one. NaN where a round does not say
    that. Attempts that failed count, each with an equal share, if they have reached the clients.
    """
    tried = ([a for a in attempts(e) if a is e or a.get("bytes_down")] for e in run.rounds)
    return [sum(map(_deployed, of_round)) for of_round in tried]


def _deployed(entry: Mapping[str, Any]) -> float:
    """Return the estimated seconds of one attempt at a round."""
    seconds = {"clients": np.nan, "probe": 0.0, "aggregate": 0.0, **entry.get("seconds", {})}
    sent = (entry.get(way, {}).values() for way in ("bytes_down", "bytes_up"))
    down, up = (max(each_sent, default=0) / 1e6 for each_sent in sent)
    steps = [*entry.get("steps", {}).values()]
    cohort = len(entry.get("cohort") or ()) or np.nan
    share = max(steps) / sum(steps) if any(steps) else 1 / cohort
    trained = (seconds["clients"] + seconds["probe"]) * share
    computed = SLOWER * trained + FIXED_SECONDS + seconds["aggregate"]
    return float(down / DOWN_MB + up / UP_MB + computed)


def on_clients(entry: Mapping[str, Any], metric: str = "accuracy") -> list[float]:
    """Return each client's metric on its own test data in a round, by client; [] where none tested.

    It is that of the client's own model, where the method gives it one.
    """
    tests = entry.get("evaluate", {}).get("clients", {})
    return [test.get(f"personal-{metric}", test[metric]) for _, test in sorted(tests.items())]


def tests_of_clients(run: RunRecord) -> list[dict[str, Any]]:
    """Return what each client tested after the last round."""
    return [*run.rounds[-1].get("evaluate", {}).get("clients", {}).values()] if run.rounds else []


def last(run: RunRecord) -> float:
    """Return the mean accuracy of a run's last five rounds, or of as many as it has."""
    return float(np.mean(run.accuracy[-LAST:]))


def collapsed(run: RunRecord) -> bool:
    """Return whether a run ends far below its best: see :data:`COLLAPSE`."""
    several = min(LAST, (len(run.accuracy) + 1) // 2)  # a short run can collapse too
    means = np.convolve(run.accuracy, np.ones(several) / several, "valid")
    return bool(means.max() - means[-1] > COLLAPSE)


def exploded(run: RunRecord) -> bool:
    """Return whether a run's test loss ends far above the untrained model's: see :data:`EXPLODED`.

    A loss that is no number, which is None in a record that was read, has exploded.
    """
    first, ends = run.test[0], run.test[-1].get("loss", 0.0)
    if ends is None or not np.isfinite(ends):
        return True
    begins = None if first["round"] else first.get("loss")
    return begins is not None and bool(ends > EXPLODED * max(begins, 1.0))


def warnings(runs: Sequence[RunRecord]) -> list[str]:
    """Say which methods diverged, failed, collapsed, had replies rejected or are equal: a sentence each.

    Rows that are the same in every test of every seed: a parameter, or a term, has done nothing.
    """
    sentences, same = [], dict[str, list[str]]()
    for label in dict.fromkeys(run.label for run in runs):
        of_label = [run for run in runs if run.label == label]
        whole = [run for run in of_label if run.whole]
        seeds = f"{len(of_label)} seed{'s' * (len(of_label) > 1)}"
        flaws = [(run, _flaws(run)) for run in of_label]
        for kind, what in FLAWS.items():
            if bad := [(run, of_run[kind]) for run, of_run in flaws if kind in of_run]:
                first = f"untrained, {np.mean([run.untrained for run, _ in bad]):.1%}"
                known = any(run.test[:1] and not run.test[0]["round"] for run, _ in bad)
                what = what.format(as_what=first if known else "0%: nobody tested them untrained")
                sentences.append(f"{label}: {len(bad)} of {seeds} {what}; {bad[0][1]}")
        logged = [text for run in of_label for text in run.warnings]
        logged += [e["divergence"] for run in whole for e in run.rounds if "divergence" in e]
        sentences += [f"{label}: {text}" for text in [*dict.fromkeys(logged)][:2]]
        if rejecting := [(run, e) for run in whole for e in run.rounds if e.get("failures")]:
            run, entry = rejecting[0]
            pid, why = next(iter(entry["failures"].items()))
            first = f"round {entry['round']} of seed {run.seed}: client {pid}: {why[:120]}"
            replies = f"replies rejected: {sum(run.rejected for run in whole)}"
            sentences.append(f"{label}: {replies}, the first in {first}")
        tested = [(run, e["evaluate"]) for run in whole for e in run.rounds if "evaluate" in e]
        if silent := [(run, test["failures"]) for run, test in tested if test.get("failures")]:
            run, failures = silent[-1]
            pid, why = next(iter(failures.items()))
            without = f"clients without a test in a round of seed {run.seed}: {len(failures)}"
            sentences.append(f"{label}: {without}, such as client {pid}: {why[:120]}")
        if absent := [(run, e) for run in whole for e in run.rounds if "missing" in e]:
            run, entry = absent[0]
            first = f"round {entry['round']} of seed {run.seed}: {entry['missing']}"
            sentences.append(f"{label}: rounds that lacked clients: {len(absent)}, first {first}")
        if len(whole) == len(of_label):
            every = sorted((run.seed, str(run.test)) for run in whole)
            same.setdefault(str(every), []).append(label)
    equal = [" and ".join(labels) for labels in same.values() if len(labels) > 1]
    return sentences + [f"{labels} are the same in every round of every seed" for labels in equal]


def _flaws(run: RunRecord) -> dict[str, str]:
    """Return what is wrong with a run: a key of `FLAWS` -> what is said of the first such seed."""
    if run.status in ENDS:
        return {run.status: f"seed {run.seed}: {run.stopped}"}
    if not run.whole:
        return {}
    flaws, seed = dict[str, str](), f"seed {run.seed}"
    best = max(run.trained, key=lambda test: float(test["accuracy"]))
    highest = f"{best['accuracy']:.1%}"
    if len(run.accuracy) >= MANY and 0 < run.untrained > best["accuracy"] - LITTLE:
        begins = f"{seed} begins at {run.untrained:.1%}, its best is {highest}"
        flaws["idle"] = f"{begins}: try another lr, or more rounds"
    if exploded(run):
        first, ends = (
            "no number" if (x := test.get("loss")) is None or not np.isfinite(x) else f"{x:.3g}"
            for test in (run.test[0], run.test[-1])
        )
        when = f"after round {begun}" if (begun := run.test[0]["round"]) else "before training"
        loss = f"the test loss of {seed} ends at {ends}, and was {first} {when}"
        flaws["exploded"] = f"{loss}: try a smaller lr"
    if collapsed(run):
        ends = f"{seed} ends at {run.accuracy[-1]:.1%}"
        flaws["collapsed"] = f"{ends}, its best was {highest} in round {best['round']}"
    return flaws


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of nothing."""
    return float(np.mean(values)) if values else None


def bytes_of_a_turn(run: RunRecord, *ways: str) -> float | None:
    """Return the bytes of a client's average turn, such as ``bytes_down``.

    A kept round has the sum over its clients, and says in ``turns`` how many they were.
    """
    sent = [b for way in ways for r in run.rounds for b in r.get(way, {}).values()]
    turns = sum(r.get("turns", len(r.get(ways[0], {}))) for r in run.rounds)
    return float(sum(sent)) / turns if turns else None


def shown(name: str, value: float | None, spread: float | None = None) -> str:
    """Return a metric's cell: accuracies in per cent."""
    if METRICS[name].unit == "%":
        return per_cent(value, spread)
    numbers = [x for x in (value, spread) if x is not None]
    return " ± ".join(f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}" for x in numbers) or "–"


def per_cent(value: float | None, spread: float | None = None) -> str:
    """Return a cell: a fraction in per cent, and its spread if there is one."""
    return " ± ".join(f"{100 * x:z.2f}" for x in (value, spread) if x is not None) or "–"
