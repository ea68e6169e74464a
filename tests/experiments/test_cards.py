"""Cards: what words choose of one, what its tables hold, and that each of them starts.

commands.txt has what is refused.
"""

import csv
import itertools
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flwr_regs.experiments import cli, words
from flwr_regs.experiments.calls import REFERENCES
from flwr_regs.experiments.cards import card_files, card_report, choices
from flwr_regs.experiments.cards.card_files import load
from flwr_regs.experiments.data import catalogue
from flwr_regs.experiments.experiment import Experiment, refuse_dead
from flwr_regs.experiments.report.results import Results
from tests.experiments.report.test_results import GOOD
from tests.experiments.report.test_results import run as record_of
from tests.experiments.test_cli import run
from tests.experiments.test_commands import CARD
from tests.experiments.test_user_code import OWN

CARDS = card_files.names()
SAMPLE = ["fedfor-t1", "fedadc-f1", "rfedavg-t1", "efl-f1", "field-guide-t1", "flute-lr-mnist"]
"""A card of each source."""
SAMPLED = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in CARDS]
ONE_SIZE = ["fedfor-t1", "field-guide-t1", "mnist-all"]
"""Cards that two processors run whole."""
TABLES = Path(__file__).with_name("tables.txt")
"""The papers' tables row by row, without their methods' and columns' other words."""


@pytest.fixture(autouse=True)
def _cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_regs.experiments.report.drawing.save", lambda *_, **__: [])
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "card.toml").write_text(CARD)


def rows(folder: str) -> list[dict[str, str]]:
    return [*csv.DictReader((Path(folder) / "protocol.csv").read_text().splitlines())]


def planned(*line: str) -> Experiment:
    """The experiment that words ask for."""
    return words.experiment_of(cli.parsed(["bench", *line]))[0]


def test_an_experiment_is_the_same_in_its_file() -> None:
    """Text is read once: what is written is read as an equal value, reduced or not."""
    for name in ("card.toml", *SAMPLE):
        card = load(name)
        levels = [choices.at(card, level) for level in choices.levels(card)]
        for experiment in (*levels, replace(card, settings={})):
            text = card_files.text(experiment, {"card": card.name, "commit": None})
            assert card_files.read(text, card.name) == experiment
    assert tomllib.loads(text)["made"] == {"card": card.name}


def test_what_is_given_wins_over_a_panel_over_the_card() -> None:
    text = CARD.replace("rounds = 1", "rounds = 1\nlr = 0.3", 1)
    text = text.replace("{num-clients = 3}", "{num-clients = 3, rounds = 5}\nreduced = {lr = 0.4}")
    Path("card.toml").write_text(text)

    def settings(*line: str) -> list[tuple[Any, ...]]:
        experiment = planned("card.toml", *line)
        methods = [
            [run.settings for run in experiment.tests(panel) if run.method not in REFERENCES]
            for panel in experiment.panels
        ]
        return [(run.rounds, run.lr, run.num_clients) for *_, run in methods]

    # the last method's own rate, in the panel that has it
    assert settings() == [(2, 0.2, 2), (5, 0.05, 3)]
    assert settings("--setting", "reduced") == [(1, 0.2, 2), (1, 0.4, 3)]
    assert settings("rounds=7", "lr=0.9") == [(7, 0.9, 2), (7, 0.9, 3)]


def test_names_with_commas_are_chosen() -> None:
    methods = "FedAvg; rFedAvg+, MNIST; FedProx(mu=0.5, weighting='uniform')"
    panels = ["MNIST, sim 0%", "CIFAR10, sim 100%"]
    for separator in (",", " ;"):
        names = methods.replace("; ", f"{separator} "), separator.join(panels)
        card = planned("rfedavg-t1", "--methods", names[0], "--panels", names[1])
        assert [panel.name for panel in card.panels] == panels
        rows = [[*card.rows_of(panel)] for panel in card.panels]
        chosen = ["FedAvg", "RFedAvgPlus(lam=0.0001)", "FedProx(mu=0.5, weighting='uniform')"]
        assert rows == [chosen, [chosen[0], chosen[2]]]


def test_a_name_chooses_its_row_alone_and_a_call_all_of_its_rows() -> None:
    more = 'A = {call = "FedProx(0.1)", settings = {lr = 0.3}}\nB = "FedProx(0.1)"'
    slow = 'Slow = {call = "FedAvg", settings = {lr = 0.01}}'
    Path("card.toml").write_text(CARD.replace("\nMine = ", f"\n{slow}\n{more}\nMine = "))
    chosen = {"FedAvg": 1, "Slow": 1, "FedAvg; Slow": 2, "FedProx(0.1)": 2, "FedAvg, A": 2}
    for methods, many in chosen.items():
        assert len(planned("card.toml", "--methods", methods).rows) == many


def test_a_smoke_test_is_small_and_checks_all_methods() -> None:
    text = CARD.replace("\nMine =", '\nOther = "FedProx(mu=0.1)"\nMine =')
    text = text.replace('["two"]}', '["two"], tune = ["lr-decay=0.8,0.9"]}')
    Path("card.toml").write_text(text.replace("rounds = 2", "rounds = 9"))
    card = planned("card.toml", "--smoke", "num-clients=4")
    assert (card.seeds, card.tunes, card.smoke, len(card.panels)) == ((1,), False, True, 1)
    first, last = card.tests(*card.panels)
    assert (first.label, last.label) == ("FedAvg", "Decay")
    small = last.settings
    assert (small.rounds, small.examples, small.num_clients, small.lr) == (2, 200, 4, 0.2)
    assert small.batch_size <= 4


def test_a_card_extends_another() -> None:
    text = """extends = "fedfor-t1"\npick = ["cross-silo"]\ntitle = "T"\n[settings]\nrounds = 3\n"""
    Path("more.toml").write_text(text)
    card, base = load("more.toml"), load("fedfor-t1")
    assert (card.title, card.where) == ("T", base.where)
    assert card.settings == {**base.settings, "rounds": 3}
    assert [panel.name for panel in card.panels] == ["cross-silo"]
    Path("more.toml").write_text('extends = "field-guide-f2"')  # which extends another one itself
    assert load("more.toml").panels == load("field-guide-f2").panels


def test_a_card_is_run_beside_its_source_and_other_data_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hashes = 'hashes = {digits = "00"}\nseeds = [1]'
    tuned = CARD.replace("settings = {lr = 0.2}, ", "")  # Mine too
    Path("card.toml").write_text(tuned.replace("seeds = [1, 2]", hashes))
    assert run("bench", "card.toml", "out=here") in (0, 1)  # 1: a method may collapse
    cells = {(r["panel"], r["method"], r["metric"]): r for r in rows("here")}
    decayed = cells["two", "Mine", "final"]
    others = {(panel, row) for panel in ("one", "two") for row in ("FedAvg", *REFERENCES)}
    assert {key[:2] for key in cells} == {*others, ("two", "Mine")}
    assert [float(decayed[key]) for key in ("source_value", "source_std", "n")] == [0.605, 0.015, 1]
    assert cells["one", "FedAvg", "final"]["source_value"] == ""
    known = catalogue.expected("digits", {})
    said = f"the hash of digits is {known}, not 00 as the card says: these are other data"
    assert capsys.readouterr().out.count(said) == 4  # before each panel and below its table
    experiment, _ = card_files.of_folder(Path("here"))
    assert experiment.hashes == {"digits": known}
    assert [panel.notes for panel in experiment.panels] == [(said,)] * 2
    before = rows("here")
    Path("here/protocol.csv").unlink()
    assert run("bench", "--resume", "here") in (0, 1)
    assert rows("here") == before
    assert run("bench", "here/two/experiment.toml", "out=again") in (0, 1)  # it is a card
    assert rows("again") == [row for row in before if row["panel"] == "two"]


def test_a_mean_over_some_of_the_seeds_is_marked() -> None:
    card = replace(load("card.toml"), metrics=("final", "rounds-to"))
    one = card.only(card_files.panel_of(card, "one"))
    results = Results([record_of("FedAvg", GOOD, 1), record_of("FedAvg", [0.5], 2)])
    text = card_report.as_text(one, card_report.report_rows(one, [results]))
    assert re.search(r"FedAvg +72.00 ± 31.11 +3 \(1 of 2\)\n", text)


@pytest.mark.parametrize("name", CARDS)
def test_every_card_is_whole(name: str) -> None:
    card = load(name)
    assert choices.levels(card) == [card.setting] + ["reduced"] * (name not in ONE_SIZE)
    for level in choices.levels(card):
        refuse_dead(choices.at(card, level).ends, "test-on-clients")


def test_a_dirichlets_alpha_is_that_of_each_class() -> None:
    """As in the codes of the Field Guide and of pfl-research; `dirichlet-hsu` divides it over them."""
    each = {"field-guide-f6": [1.0] * 5, "pfl-cifar10": [0.1], "fedadc-f4": [0.1, 0.5, 0.1, 0.5]}
    for name, alphas in each.items():
        card = load(name)
        of = [card.tests(panel)[0].settings for panel in card.panels]
        shares = [s.dirichlet_alpha / catalogue.kind_of(s.dataset).classes for s in of]
        assert shares == pytest.approx(alphas)


def test_the_tables_are_copied_right() -> None:
    tables: dict[str, dict[str, list[list[float]]]] = {}
    for block in TABLES.read_text(encoding="utf-8").split("\n\n"):
        name, *lines = block.strip().splitlines()
        table = tables.setdefault(name.strip("[]"), {})
        for method, cells in (line.split(" ", 1) for line in lines):
            each = re.split(r" (?!±)", cells)
            table[method] = [[float(number) for number in cell.split(" ±")] for cell in each]
    for name, table in tables.items():
        reported: dict[str, list[list[float]]] = {}
        for panel in load(name).panels:
            for values in panel.reports.values():
                for method, value in values.items():
                    several = value if isinstance(value, list) else [value]
                    reported.setdefault(method.partition(", ")[0], []).append(several)
        assert reported == table, name
    with_reports = {n for n in CARDS if any(p.reports for p in load(n).panels)}
    no_table = {"fedadc-f3", "fedadc-f4", "fedfor-f3", "flute-lr-mnist"}
    assert {*tables} == with_reports - no_table


@pytest.mark.full
@pytest.mark.parametrize("name", CARDS)
def test_every_model_of_every_panel_suits_its_methods(name: str) -> None:
    """At each level, in each panel."""
    card, checked = load(name), set()
    for level in choices.levels(card):
        fair = replace(choices.at(card, level), seeds=card.seeds[:1], tune=()).fair()
        for one in itertools.chain(*map(fair.tests, fair.panels)):
            key = (one.settings.model_arguments, one.method, str(one.settings.train_config))
            if key not in checked:
                one.check()
            checked.add(key)


@pytest.mark.timeout(900)  # some have large models
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
