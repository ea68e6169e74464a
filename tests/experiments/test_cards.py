"""Cards: what is refused, what words choose of one, what its tables hold, and that each of them starts."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_regs.experiments import cards_table, cli, words
from flwr_regs.experiments.cards import card_files, choices
from flwr_regs.experiments.cards.card_files import load
from flwr_regs.experiments.data import needs
from flwr_regs.experiments.data.catalogue import parsed
from flwr_regs.experiments.data.datasets import Data
from flwr_regs.experiments.experiment import Experiment, Run
from flwr_regs.experiments.partition.client_data import ClientData
from flwr_regs.experiments.settings import dead
from tests.experiments.test_commands import CARD, MINE

CARDS = card_files.names()
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


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "card.toml").write_text(CARD)


def run(*args: str) -> int:
    return cli.main([*args])


def rows(folder: str) -> list[dict[str, str]]:
    return [*csv.DictReader((Path(folder) / "protocol.csv").read_text().splitlines())]


def planned(*line: str) -> Experiment:
    """The experiment that words ask for."""
    return words.experiment_of(cli.parsed(["bench", *line]))[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('where = "Table 1"', "", "it lacks 'where'"),
        ('where = "Table 1"', 'wher = "T"', "unknown key 'wher'; did you mean 'where'"),
        ('setting = "paper"', 'setting = "full"', "'setting' must be one of paper, reduced"),
        ('["final", "bytes-beside"]', '["finale"]', "there is no 'finale'; did you mean 'final'"),
        ("rounds = 2", "round = 2", "settings: unknown setting 'round'"),
        ("rounds = 2", "seed = 2", "settings: 'seed' is no setting of a card"),
        ('FedAvg = "FedAvg"', 'FedAvg = "FedAvg, FedFOR"', "must be one call"),
        ("FedAvg = 50,", "FedAvgg = 50,", "no method 'FedAvgg'; did you mean 'FedAvg'"),
        ("FedAvg = 50,", 'FedAvg = "50",', "expected a number, or [mean, deviation]"),
        ('name = "one"', 'name = "two"', "two have one name"),
        ('panels = ["two"]', 'panels = ["tow"]', "no panel 'tow'; did you mean 'two'"),
        ('tune = ["lr=0.1,0.3"]', 'tune = ["FedFOR.alpha=1,2"]', "no method of the card has"),
        ('partition = "iid"', 'partition = "iit"', "have: partition 'iit'; did you mean 'iid'"),
        ("trials = 2", "trials = 0", "card 'card.toml': 'trials' must be a whole number of at"),
        ("seeds = [1, 2]", "seeds = [1, 1]", "'seeds' must be different whole numbers"),
        ("seeds = [1, 2]", 'extends = "nothing"', "'extends': there is no card 'nothing'"),
        ("trials = 2", 'pick = ["one"]', "'pick' goes with 'extends' alone"),
        ("trials = 2", "trials = = 2", "Invalid value (at line 9"),
        ("trials = 2", 'hashes = ["00"]', "hashes: expected a table"),
        ("trials = 2", "smoke = 1", "'smoke' must be true or false, not 1"),
        ('["final", "bytes-beside"]', "[]", "'metrics' is empty"),
        ("settings = {num-clients = 3}", "setting = {}", "panel 2: unknown key 'setting'; did you"),
        ("settings = {num-clients = 3}", "reports = 3", "panel 'one', reports: expected a table"),
        ("settings = {num-clients = 3}", "reports.finl = {}", "no metric 'finl'; did you mean"),
        ('"Table 1"', '" "', "'where' must be text, not ' '"),
        ('tune = ["lr=0.1,0.3"]', "tune = [1]", "'tune' must be a list of texts, not [1]"),
        ('FedAvg = "FedAvg"', 'FedAvg = "FedProx(muu=1)"', "no argument 'muu'; did you mean 'mu'"),
        ('FedAvg = "FedAvg"', 'FedAvg = "mine.py:Slow"', "stands here twice: name each"),
        ('call = "mine.py:Slow', 'cal = "mine.py:Slow', "must be a call, or a table with a call"),
        ("local-steps = 2", "similarity = 2", "'similarity' does nothing with partition=iid"),
    ],
)
def test_what_is_wrong_in_a_card_is_one_sentence(
    old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in CARD
    Path("card.toml").write_text(CARD.replace(old, new, 1))
    assert run("bench", "card.toml") == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not Path("results").exists()


def test_an_experiment_is_the_same_in_its_file() -> None:
    """Text is read once: what is written is read as an equal value, reduced or not."""
    for name in ("card.toml", *SAMPLE):
        for level in choices.levels(card := load(name)):
            experiment = choices.at(card, level)
            text = card_files.text(experiment, {"card": card.name, "commit": None})
            assert card_files.read(text, card.name) == experiment
    assert tomllib.loads(text)["made"] == {"card": card.name}


def test_what_is_given_wins_over_a_panel_over_the_card() -> None:
    text = CARD.replace("rounds = 1", "rounds = 1\nlr = 0.3", 1)
    text = text.replace("{num-clients = 3}", "{num-clients = 3, rounds = 5}\nreduced = {lr = 0.4}")
    Path("card.toml").write_text(text)

    def settings(*line: str) -> list[tuple[Any, ...]]:
        experiment = planned("card.toml", *line)
        runs = [experiment.tests(panel)[-1].settings for panel in experiment.panels]
        return [(run.rounds, run.lr, run.num_clients) for run in runs]

    assert settings() == [
        (2, 0.2, 2),
        (5, 0.05, 3),
    ]  # the last method's own rate, in the panel that has it
    assert settings("--setting", "reduced") == [(1, 0.2, 2), (1, 0.4, 3)]
    assert settings("rounds=7", "lr=0.9") == [(7, 0.9, 2), (7, 0.9, 3)]


def test_words_change_a_card() -> None:
    line = (
        "--methods",
        "FedAvg, FedProx(mu=0.1)",
        "--panels",
        "two",
        "--seeds",
        "4",
        "--trials",
        "1",
    )
    card = planned("card.toml", "lr=0.5", *line)
    assert [*card.rows_of(*card.panels)] == ["FedAvg", "FedProx(mu=0.1)"]
    assert (card.tune, card.seeds, card.trials) == ((), (4,), 1)  # the given rate is not tuned
    card = planned("card.toml", "--tune", "FedAvg.seed=1,2", "--tuning-seeds", "8")
    assert ([s.key for s in card.tune], card.tuning_seeds) == (["FedAvg.seed"], (8,))


@pytest.mark.parametrize(
    ("methods", "panels", "rows", "names"),
    [
        ("rFedAvg, MNIST", "MNIST, sim 0%", ["RFedAvg(lam=0.0001)"], ["MNIST, sim 0%"]),
        (
            "FedAvg, rFedAvg+, MNIST",
            "MNIST, sim 10%,MNIST, sim 0%",
            ["FedAvg", "RFedAvgPlus(lam=0.0001)"],
            ["MNIST, sim 10%", "MNIST, sim 0%"],
        ),
        (
            "FedAvg",
            " MNIST, sim 0% ;CIFAR10, sim 100%",
            ["FedAvg"],
            ["MNIST, sim 0%", "CIFAR10, sim 100%"],
        ),
        (
            "Scaffold; FedProx(mu=0.5, weighting='uniform')",
            "CIFAR10, sim 100%",
            ["SCAFFOLD(server_lr=1.0)", "FedProx(mu=0.5, weighting='uniform')"],
            ["CIFAR10, sim 100%"],
        ),
    ],
)
def test_names_with_commas_are_chosen(
    methods: str, panels: str, rows: list[str], names: list[str]
) -> None:
    card = planned("rfedavg-t1", "--methods", methods, "--panels", panels)
    assert [panel.name for panel in card.panels] == names
    assert all([*card.rows_of(panel)] == rows for panel in card.panels)


def test_a_smoke_test_is_small_and_checks_all_methods() -> None:
    text = CARD.replace("\nMine =", '\nOther = "FedProx(mu=0.1)"\nMine =').replace(
        "rounds = 2", "rounds = 9"
    )
    Path("card.toml").write_text(text)
    card = planned("card.toml", "--smoke", "num-clients=4")
    assert (card.seeds, card.tune, card.smoke, len(card.panels)) == ((1,), (), True, 1)
    first, last = card.tests(*card.panels)
    assert (first.label, last.label) == ("FedAvg", "mine.py:Slow")
    small = last.settings
    assert (small.rounds, small.examples, small.num_clients, small.lr) == (2, 200, 4, 0.2)
    assert small.batch_size <= 4
    Path("card.toml").write_text(text.replace('"lr=0.1,0.3"', '"FedProx.muu=0.1,1"'))
    with pytest.raises((ValueError, TypeError), match="no argument 'muu'; did you mean 'mu'"):
        planned("card.toml", "--smoke")


def test_a_card_extends_another() -> None:
    text = """extends = "fedfor-t1"\npick = ["cross-silo"]\ntitle = "T"\n[settings]\nrounds = 3\n"""
    Path("more.toml").write_text(text)
    card, base = load("more.toml"), load("fedfor-t1")
    assert (card.title, card.where) == ("T", base.where)
    assert card.settings == {**base.settings, "rounds": 3}
    assert [panel.name for panel in card.panels] == ["cross-silo"]
    Path("more.toml").write_text(text.replace('pick = ["cross-silo"]\n', ""))
    assert len(load("more.toml").panels) == len(base.panels)
    for old, new, message in (
        ("cross-silo", "cross-silos", "'pick': card 'fedfor-t1' has no panel"),
        ("fedfor-t1", "field-guide-f2", "extends another one itself"),
    ):
        Path("more.toml").write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            load("more.toml")


def test_files_of_a_data_set_are_there_or_not(tmp_path: Path) -> None:
    assert needs.files("digits") == needs.files("mine.py:load") == ""
    assert needs.present("digits", str(tmp_path))
    assert not needs.present("mnist", str(tmp_path))
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte").touch()
    assert needs.present("mnist", str(tmp_path))
    assert not needs.present("cifar10(augment='')", str(tmp_path))
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "train.parquet").touch()
    assert needs.present("cifar10(augment='')", str(tmp_path))


def test_a_card_is_run_beside_its_source_and_other_data_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("card.toml").write_text(
        CARD.replace("seeds = [1, 2]", 'hashes = {digits = "00"}\nseeds = [1]')
    )
    assert run("bench", "card.toml", "out=here") in (0, 1)  # 1: a method may collapse
    out = capsys.readouterr().out
    cells = {(r["panel"], r["method"], r["metric"]): r for r in rows("here")}
    slow = cells["two", "Mine", "final"]
    assert {key[:2] for key in cells} == {("two", "FedAvg"), ("two", "Mine"), ("one", "FedAvg")}
    assert (float(slow["source_value"]), float(slow["source_std"]), slow["n"]) == (
        0.605,
        0.015,
        "1",
    )
    assert cells["one", "FedAvg", "final"]["source_value"] == ""
    known = needs.expected("digits", {})
    said = f"the hash of digits is {known}, not 00 as the card says: these are other data"
    assert out.count(said) == 4  # before each panel and below its table
    kept = tomllib.loads(Path("here/experiment.toml").read_text())
    assert kept["hashes"] == {"digits": known}
    assert [panel["notes"] for panel in kept["panels"]] == [[said]] * 2
    two = tomllib.loads(Path("here/two/experiment.toml").read_text())
    assert "lr" in two["made"]["chosen"]["FedAvg"]
    assert two["made"]["chosen"]["mine.py:Slow"] == {}  # its own rate is not tuned
    before = rows("here")
    Path("here/protocol.csv").unlink()
    assert run("bench", "--resume", "here") in (0, 1)
    assert rows("here") == before
    assert run("bench", "here/two/experiment.toml", "out=again") in (0, 1)  # it is a card
    assert rows("again") == [row for row in before if row["panel"] == "two"]


def runs_of(card: Experiment) -> Iterator[Run]:
    """Yield a card's runs of one seed: at each level, in each panel, of each method."""
    for level in choices.levels(card):
        one = replace(choices.at(card, level), seeds=card.seeds[:1], tune=())
        for panel in one.fair().panels:
            yield from one.fair().tests(panel)


def test_cards_are_in_order_of_numbers() -> None:
    assert CARDS.index("rfedavg-f9") < CARDS.index("rfedavg-f10")


@pytest.mark.parametrize("name", CARDS)
def test_every_card_is_whole(name: str) -> None:
    card = load(name)
    assert not card_files.lacks(card)
    assert (card.setting == "stand-in") == any("stand-in" in text for text in card.departures)
    assert choices.levels(card) == [card.setting] + ["reduced"] * (name not in NO_FILES)
    for level in choices.levels(card):
        assert not dead([run.settings for run in choices.at(card, level).runs], "test-on-clients")
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
        reported: dict[str, list[list[float]]] = {}
        for panel in load(name).panels:
            for values in panel.reports.values():
                for method, value in values.items():
                    several = value if isinstance(value, list) else [value]
                    reported.setdefault(method.partition(", ")[0], []).append(several)
        assert reported == table, name
    with_reports = {n for n in CARDS if any(p.reports for p in load(n).panels)}
    extending = {"fedadc-f3", "fedadc-f4", "fedfor-f3"}
    assert {*tables} == with_reports - extending - {"niid-bench-cifar10-100"}


@pytest.mark.parametrize("name", SAMPLED)
def test_every_method_of_every_panel_begins_on_data_as_large_as_the_papers(name: str) -> None:
    """There are clients enough, and examples for each."""
    split, begun = set(), set()
    for one in runs_of(load(name)):
        settings = one.settings
        configs = settings.train_config, settings.evaluate_config
        if (one.method, str(configs)) not in begun:
            begun.add((one.method, str(configs)))
            one.strategy().prepare(settings.rounds, None, *configs)
        dataset = settings.dataset.partition("(")[0]
        given = parsed(settings.dataset)[1]
        groups = given.get("users") or given.get("writers") or GROUPS.get(dataset)
        total, classes = EXAMPLES.get(dataset, (20 * (groups or 1), 10))
        if settings.examples:  # so many of each of the clients' groups
            total = min(total, settings.examples)
            groups = groups and min(groups, settings.num_clients)
        key = (total, classes, groups, *(settings.config[name] for name in SPLIT))
        if key in split:
            continue
        split.add(key)
        labels = np.random.default_rng(0).permutation(np.arange(total) % classes)
        data = Data(
            *(labels[:, None], labels, labels[:1, None], labels[:1]),
            groups=None if groups is None else np.arange(total) % groups,
        )
        parts = ClientData(settings, data, settings.num_clients).parts
        assert len(parts) == settings.num_clients
        assert all(len(part) for part in parts)


@pytest.mark.full
@pytest.mark.parametrize("name", CARDS)
def test_every_model_of_every_panel_suits_its_methods(name: str) -> None:
    checked = set()
    for one in runs_of(load(name)):
        key = (one.settings.model_arguments, one.method, *one.settings.train_config)
        if key not in checked:
            one.check()
        checked.add(key)


@pytest.mark.parametrize("name", SAMPLED)
def test_every_card_starts(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("flwr_regs.experiments.data.sources.data_files.DOWNLOADS", "nowhere")
    assert run("bench", name, "--smoke", "out=here") == 0
    out = capsys.readouterr().out
    kept, _ = card_files.of_folder(Path("here"))
    assert out.count("NOTE: ") == 2  # before the run and below its table
    assert ("random records of their shape" in out) == kept.settings.get("synthetic", False)
    card = load(name)
    of_panel = [*card.rows_of(card.panels[0]).values()]
    assert {row["method"] for row in rows("here")} == {of_panel[0].name, of_panel[-1].name}


def test_the_cards_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("protocols") == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in card_files.names())
    said = cards_table.one(load("rfedavg-t1"), "", "my cards/card.toml")
    assert f"hashes of the data: mnist {needs.expected('mnist', {})}, cifar10 not known" in said
    assert "flwr-regs bench 'my cards/card.toml' --setting reduced" in said
