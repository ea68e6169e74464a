"""The cards: what each must say, what its table holds, and that each of its settings can begin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flwr_regs.experiments import cards_table
from flwr_regs.experiments.cards import protocols
from flwr_regs.experiments.cards.protocols import Card
from flwr_regs.experiments.data.catalogue import parsed
from flwr_regs.experiments.data.datasets import Data
from flwr_regs.experiments.partition.client_data import ClientData
from flwr_regs.experiments.settings.job import Job

OF_PAPERS = [
    *(f"fedfor-{n}" for n in ("t1", "t2", "t3", "t4", "t5", "f3")),
    *(f"fedadc-{n}" for n in ("t1", *(f"f{i}" for i in range(1, 8)))),
    *(f"rfedavg-{n}" for n in ("t1", "t2", "t3", *(f"f{i}" for i in range(8, 13)))),
    *(f"efl-{n}" for n in ("t2", "f1", "f2", "f3")),
    *(f"field-guide-{n}" for n in ("t1", *(f"f{i}" for i in range(1, 10)))),
]
OF_THE_FIELD = ["niid-bench-mnist", "niid-bench-cifar10-100", "pfl-cifar10", "flute-lr-mnist"]
CARDS = [*OF_PAPERS, *OF_THE_FIELD]
SAMPLE = ["fedfor-t1", "fedadc-f1", "rfedavg-t1", "efl-f1", "field-guide-t1", "flute-lr-mnist"]
"""A card of each source."""
SAMPLED = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in CARDS]
NO_FILES = ["fedfor-t1", "field-guide-t1"]

TABLES = Path(__file__).with_name("tables.txt")
"""The papers' tables row by row, without their methods' and columns' other words."""
EXAMPLES = {
    "digits": (1437, 10),
    "mnist": (60000, 10),
    "cifar10": (50000, 10),
    "cifar100": (50000, 100),
    "emnist": (112800, 47),
}
"""Data set -> how many training examples and classes it has, as far as a card splits it by label."""
SPLIT = (
    *("partition", "num-clients", "examples-per-client", "classes-per-client", "shards-per-client"),
    *("dirichlet-alpha", "similarity", "quantity-alpha", "interpolation", "sample-share"),
)
GROUPS = {"digits-five": 5, "domainnet": 6, "gld-23k": 233, "gld-160k": 1262, "shakespeare": 1146}
"""Data set -> how many groups it has, where no argument says so (McMahan et al. 2017: 1146 speakers)."""


def jobs(card: Card) -> Iterator[Job]:
    """Yield a card's runs as jobs: one for each setting, panel, and method's own settings."""
    for level in card.levels:
        for panel in card.panels:
            bench = card.bench(panel, level)
            groups: dict[str, list[str]] = {}
            for method in bench.methods:
                groups.setdefault(repr(bench.own.get(method, {})), []).append(method)
            for methods in groups.values():
                own = bench.own.get(methods[0], {})
                merged = {**bench.settings, **own, "methods": "; ".join(methods)}
                yield Job.from_run_config(merged)


def test_the_cards_are_those_of_the_papers_and_the_field() -> None:
    assert {*protocols.names()} == {*CARDS}


def test_cards_are_in_order_of_numbers() -> None:
    names = protocols.names()
    assert names.index("rfedavg-f9") < names.index("rfedavg-f10")


@pytest.mark.parametrize("name", SAMPLED)
def test_every_card_is_whole(name: str) -> None:
    card = protocols.load(name)
    assert not card.lacks
    assert (card.setting == "stand-in") == any("stand-in" in text for text in card.departures)
    assert card.levels == [card.setting] + ["reduced"] * (name not in NO_FILES)
    for panel in card.panels:
        for level in card.levels:
            bench = card.bench(panel, level)
            assert len(bench.labels) == len(card.rows_of(panel))
            assert not bench.spaces or bench.trials_of(bench.methods[0])
    assert card.where in cards_table.one(card)
    reports = any(panel.reports for panel in card.panels)
    assert reports or any("the source reports" in text for text in card.departures)
    assert card.tune or any("tuned" in text for text in card.departures)
    for panel in card.panels:
        assert not {*panel.reports} - {*card.metrics}


def test_the_tables_are_copied_right() -> None:
    tables: dict[str, dict[str, list[list[float]]]] = {}
    for block in TABLES.read_text(encoding="utf-8").split("\n\n"):
        name, *lines = block.strip().splitlines()
        table = tables.setdefault(name.strip("[]"), {})
        for method, cells in (line.split(" ", 1) for line in lines):
            parts = [[float(cell.lstrip("±")), cell[0] == "±"] for cell in cells.split()]
            table[method] = []
            for value, deviation in parts:
                if deviation:
                    table[method][-1].append(value)
                else:
                    table[method].append([value])
    for name, table in tables.items():
        card = protocols.load(name)
        reported: dict[str, list[list[float]]] = {}
        for panel in card.panels:
            for values in panel.reports.values():
                for method, value in values.items():
                    several = value if isinstance(value, list) else [value]
                    reported.setdefault(method.partition(", ")[0], []).append(several)
        assert reported == table, name
    with_reports = {n for n in CARDS if any(p.reports for p in protocols.load(n).panels)}
    extending = {"fedadc-f3", "fedadc-f4", "fedfor-f3"}
    assert {*tables} == with_reports - extending - {"niid-bench-cifar10-100"}


@pytest.mark.parametrize("name", SAMPLED)
def test_every_method_of_every_panel_begins(name: str) -> None:
    for job in jobs(protocols.load(name)):
        for method in job.method_names:
            job.strategy(method).prepare(job.rounds, None, job.train_config, job.evaluate_config)


@pytest.mark.full
@pytest.mark.parametrize("name", CARDS)
def test_every_model_of_every_panel_suits_its_methods(name: str) -> None:
    checked = set()
    for job in jobs(protocols.load(name)):
        key = (job.model_arguments, job.methods, *job.train_config)
        if key not in checked:
            job.check()
        checked.add(key)


@pytest.mark.parametrize("name", SAMPLED)
def test_every_partition_can_be_drawn(name: str) -> None:
    """Of data as large as the paper's: there are clients enough, and examples for each."""
    split = set()
    for job in jobs(protocols.load(name)):
        dataset = job.dataset.partition("(")[0]
        given = parsed(job.dataset)[1]
        groups = given.get("users") or given.get("writers") or GROUPS.get(dataset)
        total, classes = EXAMPLES.get(dataset, (20 * (groups or 1), 10))
        if job.examples:  # so many of each of the clients' groups
            total, groups = min(total, job.examples), groups and min(groups, job.num_clients)
        key = (total, classes, groups, *(job.config[setting] for setting in SPLIT))
        if key in split:
            continue
        split.add(key)
        labels = np.random.default_rng(0).permutation(np.arange(total) % classes)
        data = Data(
            *(labels[:, None], labels, labels[:1, None], labels[:1]),
            groups=None if groups is None else np.arange(total) % groups,
        )
        parts = ClientData(job, data, job.num_clients).parts
        assert len(parts) == job.num_clients
        assert all(len(part) for part in parts)


@pytest.mark.parametrize(
    ("name", "cohorts"), [("field-guide-f3", [10]), ("field-guide-f7", [10, 40, 80])]
)
def test_shares_of_clients_are_the_cohorts_of_the_field_guide(
    name: str, cohorts: list[int]
) -> None:
    card = protocols.load(name)
    panels = [card.settings_of(panel) for panel in card.panels]
    assert [*dict.fromkeys(int(s["num-clients"] * s["fraction-train"]) for s in panels)] == cohorts


def test_a_cell_of_a_table_stands_in_its_card() -> None:
    card = protocols.load("fedadc-t1")
    panel = card.panel("CIFAR-100, alpha=0.1, C=0.1")
    assert panel.reports["final"]["FedADC+"] == [56.9, 0.67]
    settings = card.settings_of(panel)
    assert (settings["num-clients"], settings["fraction-train"]) == (100, 0.1)
    assert card.settings_of(panel, "reduced")["model"] == "cnn"
    bench = card.bench(panel)
    moon = next(m for m in bench.methods if m.startswith("MOON"))
    assert bench.job(moon, {}, 1, tuning=False).lr == 0.01
    assert bench.trials_of(moon)[0].keys() == {"MOON.mu"}
