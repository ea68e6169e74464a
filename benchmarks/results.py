"""The pages of docs/results/: a benchmark's raw runs as one file, and the page that is made of them alone.

``python -m benchmarks.results keep FOLDER NAME`` packs what ``flwr-regs bench CARD`` wrote into FOLDER as
``docs/results/NAME.tar.xz``: a folder of results again, without models, the accuracies of single clients
and the times of single rounds; a trial of tuning keeps the mean of its last rounds.
``... report`` writes ``docs/results/NAME.md`` of each, and its picture of ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from benchmarks import comparisons
from benchmarks.common import table, write_picture
from flwr_regs.experiments import commands
from flwr_regs.experiments.cards import card_files, card_report
from flwr_regs.experiments.experiment import Experiment, Panel
from flwr_regs.experiments.report import drawing, metrics, plots, statistics
from flwr_regs.experiments.report.drawing import Picture
from flwr_regs.experiments.report.metrics import per_cent
from flwr_regs.experiments.report.results import Results, number, ranks_over
from flwr_regs.experiments.report.run_records import missing
from flwr_regs.experiments.report.statistics import Ranks
from flwr_regs.experiments.run import tuning
from flwr_regs.experiments.settings import DEFAULTS

ROOT = comparisons.ROOT
PAGES = ROOT / "docs" / "results"
PICTURES = ROOT / "docs" / "img" / "results"
TUNED = (
    "A small difference, even a decided one, may come from the learning rates: each method's is the best "
    "of a few that tuning drew, with one seed."
)
"""Said of a benchmark that tuned the learning rate."""
CLAIMS = Path(__file__).with_name("claims.toml")
"""What the papers claim, as comparisons of two rows of a card."""
GLANCE = 20
"""Methods that a picture shows at a glance; of more, a second picture shows the best."""
KNOWN = ("holds", "does not hold")
"""Verdicts that name their claims at the head of the page."""
HASH = 16
"""Characters of an archive's hash that a page shows."""


@dataclass(frozen=True)
class Bench:
    """A kept benchmark.

    Attributes
    ----------
    archive : Path
        Its raw runs.
    folder : Path
        The same, unpacked.
    """

    archive: Path
    folder: Path

    @classmethod
    def of(cls, name: str) -> Bench:
        """Return the benchmark of a page."""
        archive = PAGES / f"{name}{comparisons.ARCHIVE}"
        return cls(archive, comparisons.unpacked(name, PAGES))

    @cached_property
    def experiment(self) -> Experiment:
        """What ran."""
        return card_files.of_folder(self.folder)[0]

    @cached_property
    def panels(self) -> list[tuple[Panel, Path, Results]]:
        """The panels that are finished: each with its folder and its results."""
        places = card_files.places(self.experiment, self.folder)
        return [
            (panel, place, commands.results_of(self.experiment, panel, place))
            for panel, place in places
            if panel.name not in self.unfinished
        ]

    @cached_property
    def unfinished(self) -> dict[str, str]:
        """The panels that are not finished -> how far they are."""
        found = {}
        for panel, place in card_files.places(self.experiment, self.folder):
            tests, made = self.experiment.tests(panel), card_files.of_folder(place)[1]
            trials = len([*(place / "tuning" / "runs").glob("*")])
            if self.experiment.tune and "chosen" not in made:
                found[panel.name] = (
                    f"it is being tuned ({trials} trials)" if trials else "not begun"
                )
            elif lacking := missing(tests, place):
                found[panel.name] = f"{len(tests) - len(lacking)} of {len(tests)} runs"
        return found

    @cached_property
    def ranks(self) -> list[Ranks]:
        """The methods' ranks over the panels."""
        return ranks_over([results for *_, results in self.panels])


def methods_of(results: Results) -> list[dict[str, Any]]:
    """Return the rows that are compared with the first one."""
    others = metrics.references(results.runs)
    return [row for row in results.rows() if row["method"] not in {*others, results.baseline}]


def listed(labels: Sequence[str]) -> str:
    """Return labels in a sentence."""
    return ", ".join(f"`{label}`" for label in labels) or "none"


def trust(bench: Bench) -> Iterator[str]:
    """Say which methods are decided better or worse than the first one: for panels of equal methods."""
    alike: dict[frozenset[str], list[tuple[str, Results]]] = {}
    for panel, _, results in bench.panels:
        labels = frozenset(row["method"] for row in methods_of(results))
        alike.setdefault(labels, []).append((panel.name, results))
    for labels, panels in alike.items():
        names_of = "; ".join(name for name, _ in panels)
        several = f"{len(labels)} methods against {panels[0][1].baseline}, in {len(panels)} panels"
        yield f"### {several if len(panels) > 1 else names_of}"
        if len(panels) > 1:
            yield f"Panels: {names_of}."
        of_labels = [ranks for ranks in bench.ranks if labels <= {*ranks.mean.index}]
        for ranks in of_labels:
            best = [label for label in ranks.mean.index if label in labels][:3]
            near = sum(ranks.mean <= ranks.mean.iloc[0] + ranks.critical)
            first = ranks.mean.index[0]
            yield (
                f"**In short**: ranks over {ranks.blocks} panels tell {len(ranks.mean)} methods apart only "
                f"roughly. {near} of them are within Nemenyi's critical difference of the first, so they "
                f"do not say which is the best ({listed(best)} have the best mean ranks here, `{first}` "
                f"with {ranks.mean.iloc[0]:.1f}). The paired differences within a panel, below, say more."
            )
        counts = {"better": Counter[str](), "worse": Counter[str]()}
        highest = []
        for name, results in panels:
            for row in methods_of(results):
                if row["decided"]:
                    counts["better" if row["difference"] > 0 else "worse"][row["method"]] += 1
            references = metrics.references(results.runs)
            best = max(
                (row for row in results.rows() if row["method"] not in references),
                key=lambda row: float(-1 if row["last5"] is None else row["last5"]),
            )
            cell = per_cent(best["last5"], best["last5_interval"])
            how = "decided" if best["decided"] else "not decided"
            how += f" against `{results.baseline}`"
            how = "the first method itself" if best["method"] == results.baseline else how
            highest.append(f"{name}: `{best['method']}`, {cell} ({how})")
        first = panels[0][1].baseline
        said = [_decided(words, first, of, len(panels)) for words, of in counts.items()]
        said.append(f"Highest mean accuracy: {'; '.join(highest)}.")
        alone = [
            f"{name}: {per_cent(row['last5'], row['last5_interval'])}"
            for name, results in panels
            for row in results.rows()
            if row["method"] == "Local" and results.runs[0].job["test-on-clients"]
        ]
        if alone:
            said.append(f"Each client alone, without federation (`Local`): {'; '.join(alone)}.")
        yield "\n".join(f"- {line}" for line in said)
        yield (
            f"Differences to `{first}` in points{', best mean rank first' * bool(bench.ranks)}; "
            "**decided** ones are bold, and `?` is not decided:"
        )
        yield glance(bench, panels)
        if tunes_rates(bench):
            yield f"{TUNED} The tables below name them."


def tunes_rates(bench: Bench) -> bool:
    """Return whether each method's learning rate was tuned."""
    return any(space.key == "lr" for space in bench.experiment.tune)


def _decided(words: str, first: str, of: Mapping[str, int], panels: int) -> str:
    """Say of each number of panels which methods are decided better, or worse, in so many."""
    if not of:
        return f"No method is decided {words} than `{first}`."
    parts = []
    for times in sorted({*of.values()}, reverse=True):
        labels = listed([label for label, count in of.items() if count == times])
        parts.append(f"in {times} of {panels} {labels}" if panels > 1 else labels)
    return f"Decided {words} than `{first}`: {'; '.join(parts)}."


def differences(bench: Bench, most_panels: bool = False) -> Picture:
    """Draw each method's difference to the first one in each ranked panel, in the order of the ranks.

    With `most_panels`, of the methods alone that are decided better in more than half of the panels.
    """
    ranks, first = bench.ranks[0], bench.panels[0][2].baseline
    labels = [label for label in ranks.mean.index if label != first]
    panels = {
        panel.name: [rows[label] for label in labels]
        for panel, _, results in bench.panels
        if {*labels} <= {*(rows := {row["method"]: row for row in methods_of(results)})}
    }
    title, note = _title(bench, len(labels)), TUNED * tunes_rates(bench)
    look = drawing.Look(font_size=7)
    if most_panels:
        better = [
            [row["decided"] and row["difference"] > 0 for row in rows] for rows in panels.values()
        ]
        often = np.sum(better, axis=0) > len(panels) / 2
        look = replace(
            look, methods=[label for label, is_ in zip(labels, often, strict=True) if is_]
        )
        title = f"{len(look.methods)} of {title}"
        note = f"The others are decided better in fewer than half of the splits. {note}"
    return plots.differences(panels, first, title=title, note=note, look=look)


def _title(bench: Bench, methods: int) -> str:
    """Return a picture's title: it has the methods of the ranks, not all of the card's."""
    job = bench.panels[0][2].runs[0].job
    return (
        f"{methods} methods with one global model on {job['dataset']}, {job['num-clients']} clients"
    )


def glance(bench: Bench, panels: Sequence[tuple[str, Results]]) -> str:
    """Return a table of differences: a row for each method, in the order of the ranks, a column a panel."""
    cells: dict[str, dict[str, str]] = {}
    for name, results in panels:
        for row in methods_of(results):
            cell = "–"
            if row["difference"] is not None:
                cell = f"{100 * row['difference']:+.2f}".replace("-", "\N{MINUS SIGN}")
                cell = f"**{cell}**" if row["decided"] else f"{cell} ?"
                if row["difference"] == 0 and row["difference_interval"] == 0:
                    cell = "the same"
            cells.setdefault(row["method"], {})[name] = cell
    place = {
        label: at for ranks in reversed(bench.ranks) for at, label in enumerate(ranks.mean.index)
    }
    labels = sorted(cells, key=lambda label: place.get(label, len(place)))
    names = [name for name, _ in panels]
    return table(
        ["method", *names],
        [[f"`{label}`", *(cells[label].get(name, "") for name in names)] for label in labels],
    )


def panel_table(place: Path, results: Results) -> str:
    """Return a panel's table, and what goes with it."""
    experiment, made = card_files.of_folder(place)
    chosen, outcomes, rows = commands.chosen_of(experiment, place), made.get("tuning", {}), []
    for row in results.rows():
        difference, p = per_cent(row["difference"], row["difference_interval"]), row["p_holm"]
        reached = "–"
        if row["rounds_to_target"] is not None:
            reached = f"{row['rounds_to_target']:.3g} ({row['reached']} of {row['n']})"
        point = chosen.get(row["method"], {})
        short = [key.rpartition(".")[2] for key in point]
        names = [s if short.count(s) == 1 else key for s, key in zip(short, point, strict=True)]
        outcome = outcomes.get(row["method"], {"edge": ()})
        edges = [" (edge)" * (key in outcome["edge"]) for key in point]
        each = zip(names, point.values(), edges, strict=True)
        tuned = ", ".join(f"{name} {x}{edge}" for name, x, edge in each)
        tuned += f"; of {outcome['trials']}" if point and "trials" in outcome else ""
        decided = {True: "yes", False: "not decided"}[bool(row["decided"])]
        cells = [
            *(f"`{row['method']}`", per_cent(row["last5"], row["last5_interval"]), difference),
            *(("–", "–") if p is None else (f"{p:.2g}", decided)),
            *(reached, per_cent(row["worst_client"]), number(row["mb"])),
            *(str(row["diverged"]), tuned or "–"),
        ]
        rows.append(cells)
    head = [
        *("method", "last 5 rounds", f"against {results.baseline}", "Holm's p", "decided"),
        *(f"to {results.target:.0%}", "worst client", "MB", "diverged", "tuned"),
    ]
    said = [*results.decisions()[1:], *metrics.warnings(results.runs)]
    if trials := tuning.trials(place, chosen)[0]:
        said.append(tuning.cost(trials))
        said.append(
            "*Tuned*: the best point, and of how many. *Edge*: it has the smallest or the largest value "
            "that was tried. A method whose best is at an edge is given a third more points, once; the "
            "others are not."
        )
    return "\n".join([table(head, rows), "", *(f"- {line}" for line in said)])


def page(name: str) -> str:
    """Return a page: all of it is made of the raw runs."""
    bench = Bench.of(name)
    made = card_files.of_folder(bench.folder)[1]
    digest = hashlib.sha256(bench.archive.read_bytes()).hexdigest()[:HASH]
    versions = ", ".join(f"{what} {which}" for what, which in made["versions"].items())
    seeds = ", ".join(map(str, bench.panels[0][2].seeds))
    jobs = [results.runs[0].job for *_, results in bench.panels]
    known = {
        *comparisons.ELSEWHERE,
        "methods",
        "seed",
        "checkpoint-every",
        *(s.key for s in bench.experiment.tune),
    }
    shared = [
        f"`{key}={value}`"
        for key, value in jobs[0].items()
        if value != DEFAULTS[key] and key not in known and all(j[key] == value for j in jobs)
    ]
    scale = ""
    if bench.experiment.setting == "reduced":
        scale = " **The card is at its reduced setting**, smaller than the source's."
    parts = [
        f"# {bench.experiment.title}",
        f"Every run has {', '.join(shared)}. Panels differ in how the data is split, or in other settings. "
        f"[What ran](#what-ran) has the command.{scale}",
        "## Which method to trust where",
        "*Decided* means significantly better or worse: paired by seed, with Holm's adjusted p-value over "
        "a panel's methods below 0.05.",
        *trust(bench),
    ]
    if bench.unfinished:
        states = ", ".join(f"{name} ({state})" for name, state in bench.unfinished.items())
        parts += [
            f"**Not finished, and in no table**: {states}. The raw runs hold what there is. This goes "
            f"on: `tar -xf docs/results/{bench.archive.name} -C FOLDER`, then `flwr-regs bench "
            "--resume FOLDER --runner stacked --workers 2 data-dir=DIR`.",
        ]
    parts += [
        "## What ran",
        f"Trained by `{shlex.join(made['command'])}`, begun at commit `{made['commit']}`, on "
        f"{made['platform']}, with {versions}. The raw runs are [{bench.archive.name}]"
        f"({bench.archive.name}), sha256 `{digest}…`; `python -m benchmarks.results report` makes this "
        f"page of them. To train runs again and compare: `flwr-regs bench --verify docs/results/"
        f"{bench.archive.name} data-dir=DIR` trains one, drawn; `tar -xf docs/results/"
        f"{bench.archive.name} -C FOLDER`, then `flwr-regs reproduce FOLDER data-dir=DIR` all.",
    ]
    later: dict[str, list[str]] = {}
    for panel, place, _ in bench.panels:
        commit = card_files.of_folder(place)[1].get("commit", made["commit"])
        if commit != made["commit"]:
            later.setdefault(commit, []).append(panel.name)
    parts += [f"At commit `{commit}`: {'; '.join(names)}." for commit, names in later.items()]
    if bench.experiment.departures:
        parts.append("\n".join(f"- {text}" for text in bench.experiment.departures))
    if bench.ranks:
        best = f"![the methods that are decided better in most panels](../img/results/{name}-best.webp)"
        parts += [
            "## Pictures",
            *([best] if len(bench.ranks[0].mean) > GLANCE else []),
            f"![difference of each method to the first one](../img/results/{name}-differences.webp)",
            f"![mean ranks over the panels](../img/results/{name}-ranks.webp)",
        ]
    parts += [
        "## Panels",
        f"Accuracy in per cent, mean and 95 % interval over the seeds {seeds} (Student's t). Differences "
        "are paired by seed; one is decided if Holm's adjusted p-value over the panel's methods is below "
        "0.05; it is never decided if the interval contains 0. A seed that diverged is counted, and enters "
        "the mean with the untrained model's accuracy.",
        "*Worst client*: the lowest accuracy of a client with the final model, expected from the shares of "
        "its labels, or measured on its own test data where the clients test. *MB*: what a client receives "
        "and sends in the whole training. `Local`: each client trains a model alone; its accuracy is the "
        "mean over those models, on the same test data as the others'. `Pooled`: one model on all data.",
    ]
    for panel, place, results in bench.panels:
        parts += [f"### {panel.name}", f"{results.title}.", panel_table(place, results)]
    if any(panel.reports for panel, *_ in bench.panels):
        card = bench.experiment.only(*(panel for panel, *_ in bench.panels))
        rows = card_report.report_rows(card, [results for *_, results in bench.panels])
        parts += ["## Beside the source", f"```text\n{card_report.as_text(card, rows)}```"]
    return "\n\n".join(parts) + "\n"


def claims() -> list[dict[str, str]]:
    """Return the papers' claims."""
    found: list[dict[str, str]] = tomllib.loads(CLAIMS.read_text())["claims"]
    return found


def verdicts(of_papers: Sequence[dict[str, str]]) -> list[tuple[str, str]]:
    """Return each claim's verdict, and the run: paired over seeds, with Holm's correction over all."""
    gaps = [_gaps(claim) if claim["card"] in names() else None for claim in of_papers]
    tests = [
        stats.ttest_1samp(of, 0).pvalue if of is not None and len(of) and np.ptp(of) else np.nan
        for of in gaps
    ]
    adjusted = statistics.holm(pd.Series(tests, dtype=float))
    said = []
    for claim, of, p in zip(of_papers, gaps, adjusted, strict=True):
        if of is None or not len(of):
            said.append(("not run", f"needs {claim['needs']}" if "needs" in claim else "–"))
            continue
        exact = not np.ptp(of)  # a count, which no seed changes: there is nothing to test
        decided = p < statistics.LEVEL or (exact and of[0] != 0)
        verdict = (
            ("holds" if np.mean(of) > 0 else "does not hold") if decided else "not decided here"
        )
        experiment = Bench.of(claim["card"]).experiment
        scaled = "" if experiment.setting == "paper" else f", {experiment.setting}"
        metric = claim["metric"]
        higher = metrics.METRICS[metric].unit == "%"
        ways = ("ahead", "behind") if higher else ("lower", "higher")
        way, half = ways[bool(np.mean(of) < 0)], None
        if len(of) > 1 and np.ptp(of):
            half = float(statistics.half_interval(pd.DataFrame([of])).iloc[0])
        by = metrics.shown(metric, abs(float(np.mean(of))), half)
        link = f"[{claim['card']}]({claim['card']}.md)"
        unit = metrics.METRICS[metric].unit.replace("%", "points")
        chance = ", exact" if exact else f", adjusted p {f'= {p:.2g}' if p > 0.001 else '< 0.001'}"
        seeds = f"{len(of)} seeds"
        if not decided and len(of) > 1:
            shown = statistics.detectable(float(np.std(of, ddof=1)), len(of))
            seeds += f" (they detect {metrics.shown(metric, shown)} {unit})"
        said.append((verdict, f"{link}{scaled}: {way} by {by} {unit}, {seeds}{chance}"))
    return said


def _gaps(claim: dict[str, str]) -> Any:
    """Return how far a claim's method is ahead, seed by seed; None if its panel has not run."""
    bench = Bench.of(claim["card"])
    for panel, _, results in bench.panels:
        if panel.name == claim["panel"]:
            labels = {row.name: label for label, row in bench.experiment.rows_of(panel).items()}
            each = metrics.of_runs(results.runs, results.baseline)[claim["metric"]]
            if claim["metric"] == "rounds-to":  # the least that it can be
                each = each.fillna(1 + max(run.job["rounds"] for run in results.runs))
            pair = [
                each[each.index.get_level_values("label") == labels.get(claim[who])].droplevel(0)
                for who in ("method", "against")
            ]
            higher = metrics.METRICS[claim["metric"]].unit == "%"
            return ((pair[0] - pair[1]) * (1 if higher else -1)).dropna().to_numpy()
    return None


def claims_page() -> str:
    """Return the page of the papers' claims."""
    rows = [
        (
            claim["source"],
            claim["text"],
            claim["says"],
            f"`{claim['card']}`, {claim['panel']}",
            *said,
        )
        for claim, said in zip(claims(), verdicts(claims()), strict=True)
    ]
    head = ("source", "claim", "its figures", "card, panel", "here", "run")
    counts = Counter(verdict for *_, verdict, _ in rows)
    ran = len(rows) - counts.pop("not run", 0)
    verdicts_said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    known = "".join(
        f" {source}: {text} ({verdict})."
        for source, text, *_, verdict, _ in rows
        if verdict in KNOWN
    )
    text = (
        f"# The papers' claims\n\n{ran} of the {len(rows)} claims ran here: {verdicts_said}.{known} Most "
        "of these runs are too small to test their claim, so this page is no verdict on the papers.\n\n"
        "Each is a comparison of two rows of a protocol card ([Protocols](../protocols.md)), which "
        "`flwr-regs bench CARD` runs.\n\n"
        "- *Holds*: the method is ahead, paired by seed, and Holm's adjusted p-value over the claims that "
        "ran is below 0.05. *Does not hold*: it is behind, with such a p-value.\n"
        "- *Not decided here*: these seeds do not tell. Most runs are reduced, and have as few seeds as "
        "the source, three or four. The 95 % interval after ± is of one claim by itself. With so many "
        "claims, one whose interval leaves out 0 "
        "may still be chance, so the adjusted p-value decides.\n"
        "- *They detect*: the smallest difference that so many seeds show with 80 % power, in a comparison "
        "by itself. A smaller one is likely to stay undecided.\n"
        "- *exact*: a count that is the same with every seed. It is not tested, nor among the p-values.\n"
        "- *Rounds to an accuracy*: a run that does not reach it counts with one round more than it has.\n"
        "- *reduced*: smaller than the paper's setting, with fewer rounds and examples. Such a difference "
        "is not the paper's.\n\n"
        "`python -m benchmarks.results report` makes this page of `benchmarks/claims.toml` and the raw "
        "runs beside it."
    )
    return f"{text}\n\n{table(head, rows)}\n"


def names() -> list[str]:
    """Return the names of the pages that have raw runs."""
    paths = PAGES.glob(f"*{comparisons.ARCHIVE}")
    return sorted(path.name.removesuffix(comparisons.ARCHIVE) for path in paths)


def draw(name: str) -> None:
    """Draw the ranks over most methods, and their differences to the first one."""
    bench = Bench.of(name)
    if bench.ranks:
        look = drawing.Look(font_size=7)
        picture = plots.over_panels(
            bench.ranks[0], title=_title(bench, len(bench.ranks[0].mean)), look=look
        )
        write_picture(picture, PICTURES / f"{name}-ranks.webp")
        write_picture(differences(bench), PICTURES / f"{name}-differences.webp")
        if len(bench.ranks[0].mean) > GLANCE:
            write_picture(differences(bench, most_panels=True), PICTURES / f"{name}-best.webp")


def main(argv: Sequence[str] | None = None) -> int:
    """Keep or report."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    keeping = verbs.add_parser("keep")
    keeping.add_argument("folder", type=Path)
    keeping.add_argument("name")
    verbs.add_parser("report")
    given = parser.parse_args(argv)
    if given.verb == "keep":
        PAGES.mkdir(exist_ok=True)
        comparisons.keep(given.folder, PAGES / f"{given.name}{comparisons.ARCHIVE}")
        return 0
    for name in names():
        draw(name)
        (PAGES / f"{name}.md").write_text(page(name))
    (PAGES / "claims.md").write_text(claims_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
