"""The results of runs: tables for a terminal, a paper and a notebook, pictures, and their folder."""

from __future__ import annotations

import os
import platform
import subprocess
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import flwr_regs
from flwr_regs.experiments.extras import needed
from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report.folders import write
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.report.terminal import columns
from flwr_regs.experiments.settings import DEFAULTS, split_in_words
from flwr_regs.server.checkpoint.checkpoint import versions
from flwr_regs.wire.config import nearest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from flwr_regs.experiments.report.drawing import Look, Picture
    from flwr_regs.experiments.report.statistics import Ranks

OVER = ("megabytes", "seconds", "hours", "clients", "differences")
PICTURES = {"accuracy": ("round", "accuracy"), "loss": ("round", "loss")}
PICTURES |= {name: (name, "accuracy") for name in OVER}
"""Picture -> its axes."""

LABEL_SHARES = ("dirichlet", "dirichlet-hsu", "dirichlet-niid-bench", "pachinko", "similarity")
"""Partitions whose clients have some classes often and others seldom."""

AN_HOUR = 3600.0
"""Seconds on phones; a training that takes less has no picture of that time."""

POINTS = 21
"""Of the clients' quantiles, at most."""

BESIDE = {
    "personal": "{method}, mean over the clients' own test data: global model {own:.2%}, personalised "
    "{personal:.2%}",
    "averaged": "{method}: the table has the model that clients receive; the averaged model, by which its "
    "paper judges it, ends at {averaged:.2%}",
    "epsilon": "{method}: epsilon {epsilon:.3g} at delta {delta:g}, one client replaced; {clipped:.0%} of "
    "the updates were clipped",
}
"""A figure that only some rows have -> what is said below the table."""

BRIEF = 12
"""Characters of the first row's name in a heading, at most: a terminal has 80."""


@dataclass(repr=False, eq=False)
class Results:
    """Runs, and what can be made of them.

    Attributes
    ----------
    runs : sequence of RunRecord
        One for each label and seed; its ``rounds`` are the strategy's history, and its ``per_client``
        has each client's accuracy with the final model.
    notes : sequence of str
        Printed below the table.
    heading : str
        What the labels are: ``method``, a setting's name, or ``case``.
    ordered : bool
        Whether the labels are the values of an ordered parameter.
    baseline : str
        If set, a label: the table has each row's paired difference to this one.
    lacking : sequence of str
        Planned runs that have not ended, nor failed: no difference is tested before they have.
    """

    runs: Sequence[RunRecord]
    notes: Sequence[str] = ()
    heading: str = "method"
    ordered: bool = False
    baseline: str = ""
    lacking: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse no runs at all."""
        if not self.runs:
            raise ValueError("there are no runs yet")

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order of their first run."""
        return list(dict.fromkeys(run.seed for run in self.runs))

    @property
    def target(self) -> float | None:
        """The target accuracy, a fraction; None if rows have targets of their own."""
        target, *others = {float(run.job["target-accuracy"]) for run in self.runs}
        return None if others else target

    @property
    def title(self) -> str:
        """The data, the partition and the clients in words."""
        split = _either(split_in_words(run.job) for run in self.runs)
        clients = _either(map(_population, self.runs))
        data = _either(run.job["dataset"] for run in self.runs)
        return f"{data}, partition {split}, {clients}"

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of :meth:`table`."""
        needed("pandas", "pandas", "the table")
        return metrics.rows(self.runs, self.baseline, interim=bool(self.lacking))

    def table(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each label.

        Accuracies are fractions, means over the seeds that ran to their end, ``..._std`` their sample
        standard deviations (None for one seed). In ``last5`` and ``final`` a seed that diverged counts too,
        with the untrained model's accuracy.

        method, n, diverged, failed, unfinished, collapsed
            The label, its seeds, and those of them that diverged, failed, have not ended yet, or collapsed.
        last5, final, best
            The mean of the last five rounds, the last round, the best round.
        rounds_to_target, reached
            The mean of the first rounds at or above the target, over the seeds that reach it; how many do.
        worst_client, spread
            The lowest of the clients' accuracies with the final model, and their standard deviation.
        mb, mb_to_target
            10^6 bytes per client of the population, both ways: of the whole run, and until the target.
        mb_down_turn, mb_up_turn
            10^6 bytes that a client receives and sends in its average turn.
        seconds, processor_seconds
            Of a run.
        failures
            Replies that were rejected, over all seeds.
        last5_interval, final_interval
            Half the width of the mean's 95 % interval (Student's t over seeds); None for one seed.
        pairs, difference, difference_interval, p, p_holm, decided, detectable
            With a `baseline`: the paired difference of ``last5`` to the baseline's, and what
            :func:`flwr_regs.experiments.report.statistics.differences` says of that.
        epsilon, delta, clipped, own, personal, averaged
            Where there is privacy: what it spent, and the share of clipped updates. Where models were
            personalised: the mean accuracy on the clients' own data, of the global model and of theirs.
            Where the method has an averaged model (FedExP, FedACG): its accuracy after the last round.
        """
        import pandas as pd

        return pd.DataFrame(self.rows()).set_index("method")

    def plot(
        self,
        x: str = "round",
        y: str = "accuracy",
        *,
        title: str | None = None,
        size: tuple[float, float] | None = None,
        font_size: float = 8.0,
        methods: Sequence[str] = (),
        accuracy: tuple[float, float] | None = None,
    ) -> Figure:
        """Return a matplotlib Figure: accuracy or ``loss`` against ``round``, ``megabytes`` or ``seconds``.

        Or against ``hours``, the time that the rounds would take on phones, by the Field Guide's estimate.
        With ``x="clients"``, the quantiles of the clients' accuracies with the final model. With
        ``x="differences"``, each row's paired difference to the `baseline`, and its interval. Seconds are
        the processor's where all runs know them, and else the clock's.

        Parameters
        ----------
        title : str
            Above the axes, by default the data and the partition, and model and learning rate where
            they are not the default; empty: none.
        size : (float, float)
            Width and height in inches, by default 6.3 and as high as it needs.
        font_size : float
            In points, from 4 to 40.
        methods : sequence of str
            The rows of the table to draw, by default all.
        accuracy : (float, float)
            The part of an axis of accuracies that is drawn, in per cent.
        """
        from flwr_regs.experiments.report.drawing import Look

        check_rows(methods, [run.label for run in self.runs])
        if x not in (known := ("round", *OVER)):
            raise ValueError(f"x must be one of {', '.join(known)}, not {x!r}{nearest(x, known)}")
        return self._picture(x, y, Look(title, size, font_size, methods, accuracy))

    def _picture(self, x: str, y: str, look: Look) -> Picture:
        from flwr_regs.experiments.report import plots

        title = self.title
        for setting, unit in (("model", ""), ("lr", "lr ")):
            value, *others = {run.job[setting] for run in self.runs}
            if not others and value != DEFAULTS[setting]:
                title += f", {unit}{value}"
        if x == "differences":
            if not (rows := self.compared()):
                needs = "a baseline, two seeds of it and of a method, when all runs have ended"
                raise ValueError(f"differences need {needs}")
            seeds = {row["method"]: row["pairs"] for row in rows}
            how: Any = {"last": self._last, "seeds": seeds, "title": title, "look": look}
            return plots.differences({"": rows}, self.baseline, **how)
        points = self._clients() if x == "clients" else self._points()
        filled = points["part"] == "filled"  # after a run's end, and before its first test
        if x == "seconds" and points.loc[~filled, "processor_seconds"].notna().all():
            x = "processor_seconds"
        kind = "expected" if x == "clients" and not self._clients_test else ""
        target = self.target if y == "accuracy" and x != "clients" else None
        heading = "" if self.heading == "method" else self.heading
        labels = [*dict.fromkeys(run.label for run in self.runs)]
        how = {"ordered": self.ordered, "title": title, "heading": heading, "look": look}
        target = target and 100 * target
        return plots.over_rounds(points, x, y, target=target, kind=kind, labels=labels, **how)

    def rounds(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each test of a model, of each run.

        Its columns: ``method``, ``seed``, ``round`` (0: the initial model), ``accuracy`` (a fraction),
        ``loss``, and what was spent until then, by a client on average: ``megabytes``, both ways; in all:
        ``seconds`` by the clock, ``processor_seconds`` with tests, ``hours`` on phones; NaN if unknown.
        """
        import pandas as pd

        return pd.concat(map(metrics.tests, self.runs), ignore_index=True)

    def clients(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each client of each run that ended.

        Its columns: ``method``, ``seed``, ``client``; ``accuracy``, a fraction, with the final model:
        the expected one by the client's label shares, or on its own test data where clients test (NaN: it
        has none); and ``measured``, whether it is the latter.
        """
        import pandas as pd

        runs = [(run, run.per_client.get("clients", ())) for run in self.runs if run.whole]
        rows = [(r.label, r.seed, client, a) for r, each in runs for client, a in enumerate(each)]
        table = pd.DataFrame(rows, columns=["method", "seed", "client", "accuracy"])
        return table.assign(measured=self._clients_test)

    def _clients(self) -> pd.DataFrame:
        """Return quantiles over each run's clients as `plots` takes points: a row for each share."""
        known = self.clients().dropna(subset="accuracy")
        if known.empty:
            raise ValueError("no whole run holds the clients' accuracies")
        each = known.groupby(["method", "seed"], sort=False)["accuracy"]
        # of few clients, each one; the same shares for all, also where a client has no accuracy
        shares = np.linspace(0, 1, min(each.size().max(), POINTS))
        points = each.apply(lambda of: of.quantile(shares))
        points = (100 * points).rename_axis(["label", "seed", "round"]).reset_index()
        return points.assign(clients=100 * points["round"], part="whole")

    def _points(self) -> pd.DataFrame:
        """Return the runs' tests, and what they cost, as `plots` takes them."""
        import pandas as pd

        tables = []
        for run in self.runs:
            if run.accuracy or (run.diverged and run.test):
                points = metrics.tests(run).rename(columns={"method": "label"})
                points["accuracy"] *= 100
                part = {"ended": "whole", "unfinished": "unfinished"}.get(run.status, "stopped")
                tables.append(points.assign(part=part))
                if run.diverged:  # as the table's means take it
                    rounds = pd.RangeIndex(run.job["rounds"] + 1, name="round")
                    rest = points.set_index("round").reindex(rounds)
                    rest["accuracy"] = rest["accuracy"].fillna(100 * run.untrained)
                    tables.append(rest.ffill().reset_index().assign(part="filled"))
        if not tables:
            raise ValueError("there is nothing to draw: no run was tested")
        return pd.concat(tables)

    def text(self) -> str:
        """Return the table for a terminal of 80 columns, and what it needs to be read."""
        cells = [self._cells(row) for row in self.rows()]
        lines = columns([[*cells[0]], *([*row.values()] for row in cells)], right=True, width=80)
        said = [*self._legend(), *self.decisions(), *metrics.warnings(self.runs), *self._beside()]
        for text in [*said, *(f"NOTE: {note}" for note in self.notes)]:
            lines += textwrap.wrap(text, 80, break_on_hyphens=False)
        return "\n".join(lines) + "\n"

    __repr__ = text

    @property
    def _last(self) -> str:
        """Say over how many last rounds an accuracy is a mean."""
        return f"last {min(metrics.LAST, max(run.job['rounds'] for run in self.runs))}"

    @property
    def _to(self) -> str:
        """Say to what accuracy rounds are counted."""
        return "to target" if self.target is None else f"to {100 * self.target:.4g}%"

    @property
    def _by_clock(self) -> bool:
        """Whether the processor's seconds of a whole run are not known: all rows have the clock's then."""
        return any(run.whole and run.processor_seconds is None for run in self.runs)

    def _cells(self, row: dict[str, Any]) -> dict[str, str]:
        """Return a row's cells by heading."""
        several, per_cent = len(self.seeds) > 1, metrics.per_cent
        reached = "–" if row["rounds_to_target"] is None else f"{row['rounds_to_target']:.3g}"
        if several:
            reached += f" ({row['reached']} of {row['n'] - row['unfinished']})"
        cells = {self.heading: row["method"]}
        cells[self._last] = per_cent(row["last5"], row["last5_interval"])
        if self.baseline:
            first = self.baseline if len(self.baseline) <= BRIEF else "first"
            cells[f"vs {first}"] = per_cent(row["difference"], row["difference_interval"])
        else:
            cells["final"] = per_cent(row["final"], row["final_interval"])
        if not several:
            cells["best"] = per_cent(row["best"])
        cells[self._to] = reached
        cells |= {"worst": per_cent(row["worst_client"]), "MB": number(row["mb"])}
        seconds = ("s", "seconds") if self._by_clock else ("CPU s", "processor_seconds")
        return cells | {seconds[0]: number(row[seconds[1]])}

    @property
    def _clients_test(self) -> bool:
        """Whether accuracies are what the clients measure on data of their own."""
        runs = [run for run in self.runs if not run.job["personalise"]]
        return any("evaluate" in entry for run in runs for entry in run.rounds)

    def _legend(self) -> list[str]:
        counts = Counter(run.label for run in self.runs).values()
        n, least, rounds = max(counts), min(counts), _either(run.job["rounds"] for run in self.runs)
        on = {run.label: _test_data(run) for run in self.runs}
        data, *others = dict.fromkeys(on.values())
        for other in others:
            data += f", but on {other} in {', '.join(row for row in on if on[row] == other)}"
        worst = "worst: the lowest expected accuracy of a client, from its label shares"
        if self._clients_test:
            data = "what the clients test, a mean over clients"
            if own := self._labels(
                lambda run: any("personal-accuracy" in c for c in metrics.tests_of_clients(run))
            ):
                data += f" (models of the clients' own: {own})"
            worst = "worst: the lowest of a client, on its own test data"
            if by_class := self._labels(_tests_by_class):
                rows = "" if all(map(_tests_by_class, self.runs)) else f" in {by_class}"
                worst += f" (all test examples of its classes{rows}; "
                worst += "test-split=matched follows its class shares)"
        spread = "mean ± 95 % interval, " * (n > 1)
        spread += f"n = {n} (seed{'s' * (n > 1)} {', '.join(map(str, self.seeds))})"
        spread += "; two seeds say little" * (n == 2)
        spread += f"; not all runs are there: rows have {least} to {n} seeds" * (least < n)
        left = _either(run.left for run in self.runs if run.left)
        said = f"{self.title}{f' ({left})' * bool(left)}, {rounds} round{'s' * (rounds != '1')}; "
        said += f"accuracy in % on {data}; {spread}."
        means = f"{self._last}: mean over the {self._last} round{'s' * (self._last != 'last 1')}"
        means += ", or all of a run that has fewer" * (not rounds.isdigit())
        means += f"; {self._to}: rounds to it"
        means += ", each row's own target-accuracy" * (self.target is None)
        means += ", the mean of the seeds that reach it" * (len(self.seeds) > 1)
        means += f"; {worst}; MB: per client, both ways, the whole training"
        means += "; s: by the clock, as a run was resumed or in Ray" * self._by_clock + "."
        by_examples = self._labels(lambda run: run.weighting == "num-examples")
        equal = self._labels(lambda run: run.weighting == "uniform")
        if by_examples and equal:
            means += f" Clients are weighted by their examples in {by_examples}, but equally in {equal}; "
            means += "weighting=uniform weights them equally in all."
        return [said, means]

    def _labels(self, has: Callable[[RunRecord], bool]) -> str:
        """Return the labels of the runs that have something."""
        return ", ".join(dict.fromkeys(run.label for run in self.runs if has(run)))

    def compared(self) -> list[dict[str, Any]]:
        """Return the rows of methods whose difference to the baseline is tested; none before all ended."""
        if self.lacking:
            return []
        without = metrics.references(self.runs)
        rows = [row for row in self.rows() if row.get("difference_interval") is not None]
        return [row for row in rows if row["method"] not in without]

    def decisions(self) -> list[str]:
        """Say which differences to the baseline are decided, and how small ones these seeds could show."""
        if self.lacking:
            there = sum(run.status != "unfinished" for run in self.runs)
            runs = f"{len(self.lacking)} of {len(self.lacking) + there} runs have not ended"
            first = f"{'first ' * (len(self.lacking) > 1)}{self.lacking[0]}"
            return [f"Interim: {runs} ({first}); differences are tested when all have."]
        if len(self.seeds) < 3:  # two differences say too little of how far they spread
            return []
        without, said = metrics.references(self.runs), list[str]()
        methods = [row for row in self.rows() if row["method"] not in without]
        compared = [row for row in methods if row.get("pairs") is not None]
        if tested := [row for row in compared if row["p"] is not None]:
            labels = [[r["method"] for r in tested if r["decided"] == yes] for yes in (True, False)]
            decided, others = (", ".join(of) or "none" for of in labels)
            number = f"{len(tested)} comparison{'s' * (len(tested) != 1)}"
            holm = f"Holm's adjusted p < 0.05 over {number}; never if the interval contains 0"
            verdict = f"Decided ({holm}): {decided}. Not decided: {others}."
            said.append(f"vs {self.baseline}, paired by seed. {verdict}")
            shown = np.quantile([row["detectable"] for row in tested], (0, 0.5, 1))
            low, middle, high = map(metrics.per_cent, shown)
            several = f" for the median method ({low} to {high})" * (len(tested) > 1)
            least = "Smallest difference that these seeds detect with 80 % power, in a comparison by itself"
            said.append(f"{least}: {middle} points{several}.")
        silent = {r["method"]: r["pairs"] for r in compared if r["p"] is None}
        if why := [
            f"{r} ({'equal differences' if n > 2 else f'pairs: {n}'})" for r, n in silent.items()
        ]:
            needs = "a test needs three pairs, and differences that are not all equal"
            said.append(f"Not tested: {', '.join(why)}; {needs}.")
        return said

    def _beside(self) -> list[str]:
        """Return what only some runs have: privacy, personalised models."""
        pairs = product(self.rows(), BESIDE.items())
        return [text.format(**row) for row, (name, text) in pairs if row.get(name) is not None]

    def latex(self) -> str:
        """Return the table for a paper, decided differences in bold; it needs LaTeX's package booktabs."""
        import pandas as pd

        rows = self.rows()
        cells = pd.DataFrame([self._cells(row) for row in rows])
        bold = [place for place, row in enumerate(rows) if row.get("decided")]
        style = cells.style.hide(axis="index").format(escape="latex")
        style = style.format_index(escape="latex", axis="columns")
        for column in cells.columns[cells.columns.str.startswith("vs ")]:
            style = style.set_properties(subset=(bold, column), textbf="--rwrap")
        kinds = "l" + "r" * (len(cells.columns) - 1)
        body = style.to_latex(hrules=True, column_format=kinds)
        said = [*self._legend(), *self.decisions(), *("Bold: decided." for _ in bold[:1])]
        said += [f"{warning}." for warning in metrics.warnings(self.runs)]
        return f"% {' '.join(' '.join(said).split())}\n{body}"

    def save_tables(self, folder: Path) -> None:
        """Write the tables into a folder: as text, LaTeX, and every column as CSV."""
        write(folder / "table.txt", self.text())
        write(folder / "table.tex", self.latex())
        write(folder / "summary.csv", self.table().to_csv())

    def save(self, folder: Path, pictures: bool = True, look: Look | None = None) -> None:
        """Write the tables and the pictures (PNG and PDF) into a folder."""
        self.save_tables(folder)
        if pictures and any(run.accuracy for run in self.runs):
            from flwr_regs.experiments.report import drawing

            hours = np.nansum(metrics.deployed_rounds(self.runs[0]))
            known = {"hours": hours > AN_HOUR, "differences": bool(self.compared())}
            known["clients"] = any(run.whole and "worst" in run.per_client for run in self.runs)
            for name, axes in PICTURES.items():
                if known.get(name, True):
                    drawing.save(self._picture(*axes, look or drawing.Look()), folder / name)
                else:
                    drawing.remove(folder, name)


def check_rows(labels: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for a label that is no row of the table."""
    known = list(dict.fromkeys(known))
    for label in labels:
        if label not in known:
            hint = f"{nearest(label, known)} (it has {', '.join(known)})"
            raise ValueError(f"the table has no row '{label}'{hint}")


def ranks_over(results: Sequence[Results]) -> list[Ranks]:
    """Return the methods' ranks by ``last5`` over panels that have the same ones; the most methods first.

    None where there are fewer than two panels or three methods. Panels with runs to come have no ranks yet.
    """
    import pandas as pd

    from flwr_regs.experiments.report.statistics import ranks

    groups: dict[frozenset[str], list[Any]] = {}
    for of_panel in results:
        if not of_panel.lacking:
            without = [*metrics.references(of_panel.runs)]
            scores = of_panel.table()["last5"].drop(without).dropna()
            groups.setdefault(frozenset(scores.index), []).append(scores)
    several = [group for labels, group in groups.items() if len(group) > 1 and len(labels) > 2]
    return sorted((ranks(pd.DataFrame(group)) for group in several), key=lambda of: -len(of.mean))


def _population(run: RunRecord) -> str:
    """Return a run's number of clients, and how many train in a round if not all do."""
    some = run.clients * float(run.job["fraction-train"])
    return f"{run.clients} clients" + f", {max(int(some), 1)} a round" * (some < run.clients)


def _tests_by_class(run: RunRecord) -> bool:
    """Return whether a run's clients test all examples of their classes, whatever shares they have."""
    by_class = run.job["test-split"] == "classes" and not run.job["held-out-share"]
    return by_class and run.job["partition"] in LABEL_SHARES


def _test_data(run: RunRecord) -> str:
    """Return what the server tests a run's models on."""
    if run.job["held-out-clients"]:
        return "the held-out clients' data"
    return "what the clients hold out" if run.job["held-out-share"] else "the server's test set"


def _either(values: Iterable[Any]) -> str:
    """Return what all values are, or all of them if they are few."""
    different = dict.fromkeys(map(str, values))
    return " or ".join(different) if len(different) < 4 else "various"


def number(value: float | None) -> str:
    """Return a cell of three digits."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Return what produced some results: the command, the versions, and the commit of a checkout."""
    installed = {"python": platform.python_version(), **versions()}
    with suppress(PackageNotFoundError):
        installed["ray"] = version("ray")
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} x {processor()}"
    return {
        "command": [*command],
        "versions": installed,
        "commit": _commit(),
        "platform": machine,
    }


def processor() -> str:
    """Return the processor's name, where the system tells it: equal bits need an equal processor."""
    with suppress(OSError):  # no such file, except on Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the checkout that the package is imported from, if it is one."""
    home = Path(flwr_regs.__file__).parent
    git = partial(subprocess.run, capture_output=True, text=True, timeout=10, check=True, cwd=home)
    with suppress(OSError, subprocess.SubprocessError):
        git(["git", "ls-files", "--error-unmatch", "__init__.py"])
        commit = git(["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"])
        return str(commit.stdout.strip())
    return None
