"""``flwr-regs bench CARD``: each panel of a card as a tuned comparison, beside what its source reports."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from flwr_regs.experiments import commands
from flwr_regs.experiments.cards import protocols
from flwr_regs.experiments.cards.protocols import Card, Panel, Row
from flwr_regs.experiments.data import needs, subset
from flwr_regs.experiments.partition.client_data import data_of
from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report.results import provenance, write
from flwr_regs.experiments.report.run_records import file_name
from flwr_regs.experiments.run.engine import PLAN, Plan
from flwr_regs.experiments.run.tuning import Bench, Space
from flwr_regs.experiments.settings.calls import parse_methods, pieces
from flwr_regs.experiments.settings.job import Job
from flwr_regs.experiments.words import card_of, given_settings, numbers, out_folder

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
        kept = _kept(folder)
        card, smoke = kept_card(kept["card"]), kept["smoke"]
        benches = {panel: Bench.load(folder / where) for panel, where in kept["panels"].items()}
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
        folder = out_folder(str(settings.get("out", "")))
        save(folder, card, benches, provenance(["flwr-regs", *args.words]), smoke)
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
    make = Card.smoke if args.smoke else Card.bench
    return card, {panel.name: make(card, panel, args.setting, given) for panel in panels}


def asked_panels(card: Card, text: str) -> list[Panel]:
    """Return the panels of names that commas or semicolons separate; a name may have commas itself."""
    names = [panel.name for panel in card.panels]
    asked = [name for part in text.split(";") for name in rejoined(part.split(","), names)]
    return [card.panel(name) for name in asked]


def with_methods(card: Card, text: str) -> Card:
    """Return the card with these methods alone: its own by their names there, any other as a call."""
    rows: list[Row] = []
    names = [row.name for row in card.rows]
    for piece in rejoined([piece for _, piece in pieces(text, ",;")], names) or [text]:
        labels = [piece] if piece in names else parse_methods(piece)
        for label in labels:
            meant = [r for r in card.rows if label in (r.name, r.label)] or [Row(label, label)]
            rows += [r for r in meant if r not in rows]
    spaces = [t for t in card.tune if any(Space.read(t).applies(r.label) for r in rows)]
    return replace(card, rows=tuple(rows), tune=tuple(spaces))


def rejoined(parts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the parts of a list, which commas separate; parts that together are one of `names` are one.

    >>> rejoined(["MNIST", " sim 0%", "all"], ["MNIST, sim 0%", "all"])
    ['MNIST, sim 0%', 'all']
    """
    left = [part.strip() for part in parts if part.strip()]
    whole = {tuple(part.strip() for part in name.split(",")): name for name in names}
    rejoined_parts = []
    while left:
        most = next((k for k in range(len(left), 1, -1) if tuple(left[:k]) in whole), 1)
        rejoined_parts.append(whole.get(tuple(left[:most]), left[0]))
        del left[:most]
    return rejoined_parts


def save(
    folder: Path, card: Card, benches: Mapping[str, Bench], came: Mapping[str, Any], smoke: bool
) -> None:
    """Write the card, and each panel's comparison, into the results' folder."""
    where = {panel: "." if len(benches) == 1 else file_name(panel) for panel in benches}
    for panel, bench in benches.items():
        (folder / where[panel]).mkdir(parents=True, exist_ok=True)
        bench.save(folder / where[panel], came)
    kept = {"card": asdict(card), "hashes": {}, "notes": {}, "smoke": smoke, "panels": where}
    write(folder / PROTOCOL, json.dumps({**came, **kept}, indent=1))


def _kept(folder: Path) -> dict[str, Any]:
    """Return what :func:`save` wrote into a results' folder, and what the runs added."""
    kept: dict[str, Any] = json.loads((folder / PROTOCOL).read_text(encoding="utf-8"))
    return kept


def kept_card(kept: Mapping[str, Any]) -> Card:
    """Return the card that a results' folder keeps."""
    rows = tuple(Row(**row) for row in kept["rows"])
    return Card(**{**kept, "rows": rows, "panels": tuple(Panel(**p) for p in kept["panels"])})


def _train(
    card: Card, benches: Mapping[str, Bench], folder: Path, workers: int, smoke: bool
) -> int:
    status, kept = 0, _kept(folder)
    seen: dict[str, str] = {}
    for panel, bench in benches.items():
        print(f"{card.name}, {card.source}, {card.where}: {panel}", flush=True)
        said = notes(card, bench, smoke, seen, kept["hashes"])
        for note in said:
            print(f"NOTE: {note}", flush=True)
        kept["hashes"] = {**seen, **kept["hashes"]}
        kept["notes"][panel] = [*dict.fromkeys([*kept["notes"].get(panel, []), *said])]
        write(folder / PROTOCOL, json.dumps(kept, indent=1))
        there = folder / kept["panels"][panel]
        came = bench.provenance(there)
        results, ended = commands.train_bench(bench, there, came, workers, not smoke, folder)
        wrong = not smoke and commands.went_wrong(results)
        status = max(status, ended, int(wrong))
    rows = report_rows(card, folder)
    table = pd.DataFrame(rows, columns=[*rows[0]] if rows else ["panel"])
    write(folder / "protocol.csv", table.to_csv(index=False))
    write(folder / "protocol.txt", text := as_text(card, rows, kept["notes"]))
    print(text + f"results: {folder}", flush=True)
    return status


def notes(
    card: Card, bench: Bench, smoke: bool, seen: dict[str, str], before: Mapping[str, str]
) -> list[str]:
    """Return what the reader must know of the data of a panel; add the data's hash to `seen`.

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
    if name not in seen:
        seen[name] = subset.fingerprint(data_of(replace(job, examples=0, num_classes=0)))
    said = []
    if (known := needs.expected(name, card.hashes)) and seen[name] != known:
        said.append(f"the hash of {name} is {seen[name]}, the card's {known}: these are other data")
    if (old := before.get(name, seen[name])) != seen[name]:
        said.append(
            f"the hash of {name} is {seen[name]}, but it was {old} when this run began: these are other "
            "data"
        )
    return said


def places(folder: Path) -> list[Path]:
    """Return the folders with results: of a card's panels those whose test has begun, or itself."""
    if not (folder / PROTOCOL).is_file():
        return [folder]
    panels = [folder / place for place in _kept(folder)["panels"].values()]
    return [place for place in panels if (place / PLAN).is_file()] or panels[:1]


def report_rows(card: Card, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each panel, method and metric: ours, and what the source reports.

    Accuracies are fractions; the source's too.
    """
    names = ("panel", "method", "metric", "value", "std", "n", "source_value", "source_std")
    rows = []
    for name, place in _kept(folder)["panels"].items():
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
            of_row = [run for run in runs if run.label == labels[row.label]]
            for metric in card.metrics:
                ours = metrics.mean_and_spread(metric, of_row, first)
                scale = 0.01 if metrics.METRICS[metric].unit == "%" else 1.0
                reported = panel.reports.get(metric, {}).get(row.name)
                theirs = reported if isinstance(reported, list) else [reported]
                scaled = [None if value is None else scale * value for value in theirs]
                cells = (name, row.name, metric, *ours, *scaled, None)
                rows.append(dict(zip(names, cells, strict=False)))
    return rows


def as_text(
    card: Card, rows: Sequence[Mapping[str, Any]], said: Mapping[str, Sequence[str]]
) -> str:
    """Return the report for a terminal: a line for each method of a panel, the source's in brackets.

    `said` are the notes of each panel.
    """
    lines = [f"{card.title} ({card.source}, {card.where}); in brackets what the source reports"]
    for panel in dict.fromkeys(row["panel"] for row in rows):
        methods: dict[str, list[str]] = {"": [*card.metrics]}
        for row in rows:
            if row["panel"] == panel:
                methods.setdefault(row["method"], []).append(_cell(row))
        cells = [[name, *texts] for name, texts in methods.items()]
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
