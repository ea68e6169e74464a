"""``flwr-regs bench CARD``: each panel of a card as a tuned comparison, beside what its source reports."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr_regs.experiments import commands
from flwr_regs.experiments.cards import protocols
from flwr_regs.experiments.cards.protocols import Card, Panel, Row
from flwr_regs.experiments.data import needs, subset
from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report.results import provenance, write
from flwr_regs.experiments.report.run_records import file_name
from flwr_regs.experiments.run.engine import PLAN, Plan
from flwr_regs.experiments.run.tuning import Bench, Space
from flwr_regs.experiments.settings.calls import parse_methods, pieces
from flwr_regs.experiments.settings.job import Job
from flwr_regs.experiments.words import card_of, given_settings, named_folder, numbers

PROTOCOL = "protocol.json"
"""In a results' folder: the card, and where its panels are."""
OPTIONS = ("setting", "methods", "panels", "smoke")
"""Of `bench`, with a card alone."""


def bench(args: argparse.Namespace) -> int:
    """Do ``bench``, of a card or of settings."""
    name = card_of(args)
    if name or (args.resume and (args.resume / PROTOCOL).is_file()):
        return run(args, name)
    if wrong := [option for option in OPTIONS if getattr(args, option)]:
        raise ValueError(
            f"--{wrong[0]} goes with a card, such as: flwr-regs bench fedadc-t1 (`flwr-regs protocols` "
            "shows all)"
        )
    return commands.bench(args)


def run(args: argparse.Namespace, name: str) -> int:
    """Run a card, or go on with one; return 1 if a method diverged, failed or collapsed."""
    if args.resume:
        if name:
            raise ValueError("--resume takes its card from the folder: leave the name out")
        folder = commands.resumed(args)
        kept = json.loads((folder / PROTOCOL).read_text(encoding="utf-8"))
        card = kept_card(folder)
        benches = {panel: Bench.load(folder / where) for panel, where in kept["panels"].items()}
        smoke = kept["smoke"]
    else:
        card, benches = planned(args, name)
        smoke = args.smoke
    for bench in benches.values():
        bench.check()
    if args.dry_run:
        status = 0
        for panel, bench in benches.items():
            print(f"{card.name}, {panel}:")
            there = folder / kept["panels"][panel] if args.resume else None
            status = max(status, commands.dry_bench(bench, args.workers, there))
        return status
    if not args.resume:
        settings = given_settings(args.settings, args.app)
        folder = named_folder(str(settings.get("out", "")))
        save(folder, card, benches, provenance(commands.said(args)), smoke)
    return _train(card, benches, folder, args.workers, smoke)


def planned(args: argparse.Namespace, name: str) -> tuple[Card, dict[str, Bench]]:
    """Return the card as the words change it, and the tuned comparison of each panel that they ask for."""
    card = protocols.load(name)
    given = given_settings(args.settings, args.app)
    methods = str(given.pop("methods", "")) or args.methods
    given.pop("out", None)
    if "seed" in given:
        raise ValueError("'seed' does not count beside a card's seeds: give --seeds")
    if methods:
        card = with_methods(card, methods)
    if args.tune:
        card = replace(card, tune=tuple(args.tune))
    if args.trials is not None:
        card = replace(card, trials=args.trials)
    if args.seeds:
        card = replace(card, seeds=numbers(args.seeds, "--seeds"))
    if args.tuning_seeds:
        card = replace(card, tuning_seeds=numbers(args.tuning_seeds, "--tuning-seeds"))
    if card.lacks:
        raise ValueError(
            f"card '{name}' needs what this version does not have: {', '.join(card.lacks)}"
        )
    panels = asked_panels(card, args.panels) or [*card.panels]
    if args.smoke:
        panels = panels[:1]
    make = smoke if args.smoke else Card.bench
    return card, {panel.name: make(card, panel, args.setting, given) for panel in panels}


def asked_panels(card: Card, text: str) -> list[Panel]:
    """Return the panels of names that commas or semicolons separate; a name may have commas itself."""
    names = [panel.name for panel in card.panels]
    asked = [name for part in text.split(";") for name in rejoined(part.split(","), names)]
    return [card.panel(name) for name in asked]


def smoke(card: Card, panel: Panel, level: str, given: Mapping[str, Any]) -> Bench:
    """Return a panel's smoke test; where its data's files are absent, on records that stand in for them."""
    bench = card.smoke(panel, level, given)
    dataset, folder = (str(bench.settings.get(key, "")) for key in ("dataset", "data-dir"))
    if needs.present(dataset, folder):
        return bench
    return replace(bench, settings={**bench.settings, "synthetic": True})


def with_methods(card: Card, text: str) -> Card:
    """Return the card with these methods alone: its own by their names there, any other as a call."""
    rows: list[Row] = []
    own = [row.name for row in card.rows]
    for piece in rejoined([piece for _, piece in pieces(text, ",;")], own) or [text]:
        labels = [piece] if piece in own else parse_methods(piece)
        for label in labels:
            found = [r for r in card.rows if label in (r.name, r.label)] or [Row(label, label)]
            rows += [r for r in found if r not in rows]
    names = {row.name for row in rows}
    panels = [
        replace(
            panel,
            reports={
                metric: {name: value for name, value in values.items() if name in names}
                for metric, values in panel.reports.items()
            },
        )
        for panel in card.panels
    ]
    spaces = [t for t in card.tune if any(Space.read(t).applies(r.label) for r in rows)]
    return replace(card, rows=tuple(rows), panels=tuple(panels), tune=tuple(spaces))


def rejoined(parts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the parts of a list, which commas separate; parts that together are one of `names` are one.

    >>> rejoined(["MNIST", " sim 0%", "all"], ["MNIST, sim 0%", "all"])
    ['MNIST, sim 0%', 'all']
    """
    left = [part.strip() for part in parts if part.strip()]
    whole = {tuple(part.strip() for part in name.split(",")): name for name in names}
    found = []
    while left:
        most = next((k for k in range(len(left), 1, -1) if tuple(left[:k]) in whole), 1)
        found.append(whole.get(tuple(left[:most]), left[0]))
        del left[:most]
    return found


def save(
    folder: Path, card: Card, benches: Mapping[str, Bench], came: Mapping[str, Any], smoke: bool
) -> None:
    """Write the card, and each panel's comparison, into the results' folder."""
    where = {panel: "." if len(benches) == 1 else file_name(panel) for panel in benches}
    for panel, bench in benches.items():
        (folder / where[panel]).mkdir(parents=True, exist_ok=True)
        bench.save(folder / where[panel], came)
    rows = [{"name": r.name, "call": r.call, "panels": [*r.panels]} for r in card.rows]
    reports = {panel: card.panel(panel).reports for panel in benches}
    datasets = [Job.from_run_config(dict(bench.settings)).dataset for bench in benches.values()]
    kept = {
        **came,
        "card": card.name,
        "title": card.title,
        "source": card.source,
        "where": card.where,
        "setting": card.setting,
        "metrics": [*card.metrics],
        "hashes": {},
        "expected": {n: h for n in datasets if (h := needs.expected(n, card.hashes))},
        "notes": {},
        "smoke": smoke,
        "panels": where,
        "rows": rows,
        "reports": reports,
    }
    write(folder / PROTOCOL, json.dumps(kept, indent=1))


def kept_card(folder: Path) -> Card:
    """Return what a results' folder holds of its card: all that the report needs."""
    kept = json.loads((folder / PROTOCOL).read_text(encoding="utf-8"))
    return Card(
        name=kept["card"],
        title=kept["title"],
        source=kept["source"],
        where=kept["where"],
        setting=kept["setting"],
        metrics=tuple(kept["metrics"]),
        settings={},
        rows=tuple(Row(r["name"], r["call"], {}, tuple(r["panels"])) for r in kept["rows"]),
        panels=tuple(Panel(name, {}, {}, kept["reports"][name]) for name in kept["panels"]),
        reduced={},
        tune=(),
        trials=1,
        seeds=(),
        tuning_seeds=(),
        departures=(),
        hashes=kept["expected"],
    )


def _train(
    card: Card, benches: Mapping[str, Bench], folder: Path, workers: int, smoke: bool
) -> int:
    status = 0
    kept = json.loads((folder / PROTOCOL).read_text(encoding="utf-8"))
    where, kept["notes"] = kept["panels"], kept.get("notes", {})
    found: dict[str, str] = {}
    for panel, bench in benches.items():
        print(f"{card.name}, {card.source}, {card.where}: {panel}", flush=True)
        said = notes(card, bench, smoke, found, kept["hashes"])
        for note in said:
            print(f"NOTE: {note}", flush=True)
        kept["hashes"] = {**found, **kept["hashes"]}
        kept["notes"][panel] = [*dict.fromkeys([*kept["notes"].get(panel, []), *said])]
        write(folder / PROTOCOL, json.dumps(kept, indent=1))
        there = folder / where[panel]
        came = bench.provenance(there)
        results, ended = commands.train_bench(bench, there, came, workers, not smoke, folder)
        wrong = not smoke and commands.went_wrong(results)
        status = max(status, ended, int(wrong))
    rows = report_rows(card, folder)
    write(folder / "protocol.csv", as_csv(rows))
    write(folder / "protocol.txt", text := as_text(card, rows, kept["notes"]))
    print(text + f"results: {folder}", flush=True)
    return status


def notes(
    card: Card, bench: Bench, smoke: bool, found: dict[str, str], before: Mapping[str, str]
) -> list[str]:
    """Return what the reader must know of the data of a panel; add the data's hash to `found`.

    `before` are the hashes when the run began, where this goes on with it.
    """
    job = Job.from_run_config(dict(bench.settings))
    name = job.dataset
    if job.synthetic:
        return [
            f"the files of {name} are not here: this run is on {subset.RECORDS} random records of their "
            "shape, and its accuracies say nothing"
        ]
    if smoke:
        return ["a smoke test: its accuracies say nothing"]
    if name not in found:
        found[name] = subset.fingerprint(replace(job, examples=0, num_classes=0).data())
    now, said = found[name], []
    if (known := needs.expected(name, card.hashes)) and now != known:
        said.append(f"the hash of {name} is {now}, the card's {known}: these are other data")
    if (old := before.get(name, now)) != now:
        said.append(
            f"the hash of {name} is {now}, but it was {old} when this run began: these are other data"
        )
    return said


def places(folder: Path) -> list[Path]:
    """Return the folders with results: of a card's panels those whose test has begun, or itself."""
    if not (folder / PROTOCOL).is_file():
        return [folder]
    kept = json.loads((folder / PROTOCOL).read_text(encoding="utf-8"))["panels"]
    begun = [folder / place for place in kept.values() if (folder / place / PLAN).is_file()]
    return begun or [folder / place for place in kept.values()][:1]


def report_rows(card: Card, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each panel, method and metric: ours, and what the source reports.

    Accuracies are fractions; the source's too.
    """
    where = json.loads((folder / PROTOCOL).read_text(encoding="utf-8"))["panels"]
    found = []
    for name, place in where.items():
        if not (folder / place / PLAN).is_file():
            continue
        panel = card.panel(name)
        bench = Bench.load(folder / place)
        runs = Plan.load(folder / place).recorded(folder / place)
        labels = {label: row for row, label in bench.labels.items()}
        first = [run for run in runs if run.label == next(iter(bench.labels))]
        for row in card.rows_of(panel):
            if row.label not in labels:  # a smoke test trains two of them
                continue
            mine = [run for run in runs if run.label == labels[row.label]]
            for metric in card.metrics:
                value, spread, n = metrics.mean_and_spread(metric, mine, first)
                reported = panel.reports.get(metric, {}).get(row.name)
                theirs = _fractions(metric, reported)
                found.append(
                    {
                        "panel": name,
                        "method": row.name,
                        "metric": metric,
                        "value": value,
                        "std": spread,
                        "n": n,
                        "source_value": theirs[0],
                        "source_std": theirs[1],
                    }
                )
    return found


def _fractions(metric: str, reported: Any) -> tuple[float | None, float | None]:
    """Return what a source reports, as our metrics count: accuracies as fractions."""
    if reported is None:
        return None, None
    scale = 0.01 if metrics.METRICS[metric].unit == "%" else 1.0
    value, *spread = reported if isinstance(reported, list) else [reported]
    return scale * value, scale * spread[0] if spread else None


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the report's rows as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [*rows[0]] if rows else ["panel"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_text(
    card: Card, rows: Sequence[Mapping[str, Any]], said: Mapping[str, Sequence[str]]
) -> str:
    """Return the report for a terminal: a line for each method of a panel, the source's in brackets.

    `said` are the notes of each panel.
    """
    lines = [f"{card.title} ({card.source}, {card.where}); in brackets what the source reports"]
    for panel in dict.fromkeys(row["panel"] for row in rows):
        mine = [row for row in rows if row["panel"] == panel]
        names = list(dict.fromkeys(row["method"] for row in mine))
        cells = [["", *card.metrics]]
        for name in names:
            cells.append([name, *(_cell(r) for r in mine if r["method"] == name)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", panel]
        lines += [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
            for line in cells
        ]
        lines += [f"NOTE: {note}" for note in said.get(panel, ())]
    lines += ["", *(f"{m}: {metrics.METRICS[m].meaning}" for m in card.metrics)]
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[str, Any]) -> str:
    name = row["metric"]
    ours = metrics.shown(name, row["value"], row["std"])
    if row["source_value"] is None:
        return ours
    return f"{ours} [{metrics.shown(name, row['source_value'], row['source_std'])}]"
