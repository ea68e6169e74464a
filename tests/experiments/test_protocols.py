"""Protocol cards: what is refused, what is run, and that every card of the package starts."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flwr_regs.experiments import cli
from flwr_regs.experiments.cards import protocol_runs, protocols
from flwr_regs.experiments.data import needs
from flwr_regs.experiments.data.catalogue import SOURCES
from flwr_regs.experiments.partition.client_data import data_of
from flwr_regs.experiments.partition.partitions import partition, partition_hash
from flwr_regs.experiments.settings.job import Job
from tests.experiments.test_cards import SAMPLED

CARD = """
title = "Mine"
source = "Me"
where = "Table 1"
setting = "paper"
metrics = ["final", "bytes-beside"]
seeds = [1, 2]
tune = ["lr=0.1,0.3"]
trials = 2

[settings]
dataset = "mine.py:load"
model = "mine.py:Net"
partition = "iid"
num-clients = 2
rounds = 2
local-epochs = 1

[reduced]
rounds = 1

[methods]
FedAvg = "FedAvg"
Mine = {call = "mine.py:Slow(rate=0.5)", settings = {lr = 0.2}, panels = ["two"]}

[[panels]]
name = "two"
reports.final = {FedAvg = 50, Mine = [60.5, 1.5]}

[[panels]]
name = "one"
settings = {num-clients = 3}
"""
MINE = """
import numpy as np
import torch
from dataclasses import dataclass
from typing import ClassVar
from flwr_regs import Term

def load():
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = rng.normal(size=(60, 3)).astype("float32") + y[:, None]
    return x[:40], y[:40], x[40:], y[40:]

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

@dataclass(frozen=True)
class Slow(Term):
    name: ClassVar[str] = "slow"
    rate: float
    def correct(self, grads, params, ctx):
        return {n: self.rate * g for n, g in grads.items()}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "card.toml").write_text(CARD)


def run(*args: str) -> int:
    return cli.main([*args])


def rows(folder: str) -> list[dict[str, str]]:
    return [*csv.DictReader((Path(folder) / "protocol.csv").read_text().splitlines())]


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
        ('["final", "bytes-beside"]', "[]", "'metrics' is empty"),
        ("settings = {num-clients = 3}", "setting = {}", "panel 2: unknown key 'setting'; did you"),
        ("settings = {num-clients = 3}", "reports = 3", "panel 'one', reports: expected a table"),
        ("settings = {num-clients = 3}", "reports.finl = {}", "no metric 'finl'; did you mean"),
        ("FedAvg = 50,", "FedAvg = nan,", "expected a number, or [mean, deviation]"),
        ('"Table 1"', '" "', "'where' must be text, not ' '"),
        ('tune = ["lr=0.1,0.3"]', "tune = [1]", "'tune' must be a list of texts, not [1]"),
        ('FedAvg = "FedAvg"', 'FedAvg = "FedProx(muu=1)"', "no argument 'muu'; did you mean 'mu'"),
        ('call = "mine.py:Slow', 'cal = "mine.py:Slow', "must be a call, or a table with a call"),
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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bench", "fedadc-t2"], "there is no card 'fedadc-t2'; did you mean 'fedadc-"),
        (["bench", "none.toml"], "there is no card at none.toml"),
        (["bench", "--smoke"], "--smoke goes with a card"),
        (["bench", "card.toml", "--setting", "stand-in"], "no setting 'stand-in', only paper and"),
        (["bench", "card.toml", "--panels", "tow"], "no panel 'tow'; did you mean 'two'"),
        (["bench", "card.toml", "fedfor-t1"], "one card at a time"),
        (["bench", "card.toml", "seed=1"], "give --seeds"),
        (["protocols", "lr=1"], "protocols takes data-dir=..., not lr"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_one_sentence(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_card_of_ones_own_with_own_data_model_and_method(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("bench", "card.toml", "out=here") in (0, 1)  # 1: a method may collapse
    text = capsys.readouterr().out
    assert "[60.50 ± 1.50]" in text
    cells = {(r["panel"], r["method"], r["metric"]): r for r in rows("here")}
    plain, slow = cells["two", "FedAvg", "final"], cells["two", "Mine", "final"]
    assert float(plain["value"]) != float(slow["value"]) or plain["std"]
    assert float(slow["source_std"]) == pytest.approx(0.015)
    assert {key[:2] for key in cells} == {("two", "FedAvg"), ("two", "Mine"), ("one", "FedAvg")}
    assert (float(slow["source_value"]), slow["n"]) == (0.605, "2")
    assert cells["one", "FedAvg", "final"]["source_value"] == ""
    assert float(cells["two", "FedAvg", "bytes-beside"]["value"]) == 0
    kept = json.loads(Path("here/protocol.json").read_text())
    assert list(kept["hashes"]) == ["mine.py:load"]
    tuned = json.loads(Path("here/two/settings.json").read_text())["chosen"]
    assert "lr" in tuned["FedAvg"]
    assert tuned["mine.py:Slow(rate=0.5)"] == {}  # its own lr is not tuned
    before = rows("here")
    Path("here/protocol.csv").unlink()
    assert run("bench", "--resume", "here") in (0, 1)
    assert rows("here") == before


def test_words_change_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    args = cli._parser().parse_args(
        ["bench", "card.toml", "lr=0.5", "--methods", "FedAvg, FedProx(mu=0.1)", "--panels", "two"]
    )
    args.settings = args.settings[1:]
    _, benches = protocol_runs.planned(args, "card.toml")
    (bench,) = benches.values()
    assert bench.methods == ["FedAvg", "FedProx(mu=0.1)"]
    assert (bench.settings["lr"], bench.tune, bench.seeds) == (0.5, (), (1, 2))
    assert run("bench", "card.toml", "--setting", "reduced", "--seeds", "1", "--dry-run") == 0
    assert "1 rounds" in capsys.readouterr().out


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
    args = cli._parser().parse_args(
        ["bench", "rfedavg-t1", "--methods", methods, "--panels", panels]
    )
    args.settings = []
    _, benches = protocol_runs.planned(args, "rfedavg-t1")
    assert [*benches] == names
    assert all(bench.methods == rows for bench in benches.values())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("a, half, b", ["a, half", "b"]),
        ("b,a, half", ["b", "a, half"]),
        ("a; a, half ;b", ["a", "a, half", "b"]),
    ],
)
def test_a_panels_name_may_have_a_comma(text: str, names: list[str]) -> None:
    card = protocols.load("card.toml")
    card = replace(card, panels=tuple(map(protocols.Panel, ("a", "a, half", "b"))))
    assert [panel.name for panel in protocol_runs.asked_panels(card, text)] == names
    with pytest.raises(ValueError, match=r"no panel 'c'.* it has a; a, half; b"):
        protocol_runs.asked_panels(card, "a, c")


def test_what_is_given_wins_over_a_panel_over_the_card(tmp_path: Path) -> None:
    text = CARD.replace("rounds = 1\n", "rounds = 1\nlr = 0.3\n", 1)
    text = text.replace("{num-clients = 3}", "{num-clients = 3, rounds = 5}\nreduced = {lr = 0.4}")
    (tmp_path / "card.toml").write_text(text)
    card = protocols.load("card.toml")
    two, one = card.panels
    assert [card.settings_of(p)["rounds"] for p in (two, one)] == [2, 5]
    assert [card.settings_of(p, "reduced")["rounds"] for p in (two, one)] == [1, 1]
    assert [card.settings_of(p, "reduced")["lr"] for p in (two, one)] == [0.3, 0.4]
    (tmp_path / "card.toml").write_text(CARD.replace("[reduced]\nrounds = 1", ""))
    assert protocols.load("card.toml").levels == ["paper"]
    only = CARD.replace("[reduced]\nrounds = 1", "") + "reduced = {rounds = 1}\n"
    (tmp_path / "card.toml").write_text(only)
    assert protocols.load("card.toml").levels == ["paper", "reduced"]
    given = {"rounds": 7, "lr": 0.9, "code-dir": str(tmp_path)}
    bench = card.bench(two, "", given)
    assert (bench.settings["rounds"], bench.settings["lr"]) == (7, 0.9)
    assert bench.own == {}  # Mine's own lr too
    assert card.bench(two).own == {"mine.py:Slow(rate=0.5)": {"lr": 0.2}}


def test_a_smoke_test_is_small_and_what_is_given_wins(tmp_path: Path) -> None:
    text = CARD.replace("\nMine =", '\nOther = "FedProx(mu=0.1)"\nMine =').replace(
        "rounds = 2", "rounds = 9"
    )
    (tmp_path / "card.toml").write_text(text)
    card = protocols.load("card.toml")
    bench = card.smoke(card.panels[0], "", {"code-dir": str(tmp_path), "num-clients": 4})
    assert (bench.seeds, bench.tune) == ((1,), ())
    assert bench.methods == ["FedAvg", "mine.py:Slow(rate=0.5)"]  # the first and the last
    small = bench.settings
    assert (small["rounds"], small["examples"], small["num-clients"]) == (2, 200, 4)
    assert small["batch-size"] <= 4
    args = cli._parser().parse_args(["bench", "card.toml", "--smoke"])
    args.settings = []
    assert list(protocol_runs.planned(args, "card.toml")[1]) == ["two"]


def test_a_card_extends_another(tmp_path: Path) -> None:
    text = """extends = "fedfor-t1"\npick = ["cross-silo"]\ntitle = "T"\n[settings]\nrounds = 3\n"""
    (tmp_path / "more.toml").write_text(text)
    card, base = protocols.load("more.toml"), protocols.load("fedfor-t1")
    assert (card.title, card.where) == ("T", base.where)
    assert card.settings == {**base.settings, "rounds": 3}
    assert [panel.name for panel in card.panels] == ["cross-silo"]
    for old, new, message in (
        ("cross-silo", "cross-silos", "'pick': card 'fedfor-t1' has no panel"),
        ('pick = ["cross-silo"]\n', "", "no panel has"),
        ("fedfor-t1", "field-guide-f2", "extends another one itself"),
    ):
        (tmp_path / "more.toml").write_text(text.replace(old, new))
        if message == "no panel has":
            assert len(protocols.load("more.toml").panels) == len(base.panels)
            continue
        with pytest.raises(ValueError, match=message):
            protocols.load("more.toml")


def test_files_of_a_data_set_are_there_or_not(tmp_path: Path) -> None:
    assert needs.files("digits") == needs.files("mine.py:load") == ""
    assert needs.present("digits", str(tmp_path))
    assert needs.present("mine.py:load", str(tmp_path))
    assert not needs.present("mnist", str(tmp_path))
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte").touch()
    assert needs.present("mnist", str(tmp_path))
    assert not needs.present("cifar10(augment='')", str(tmp_path))
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "train.parquet").touch()
    assert needs.present("cifar10(augment='')", str(tmp_path))


def test_other_data_than_the_cards_or_the_begun_runs_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = CARD.replace("[reduced]", '[hashes]\n"mine.py:load" = "00"\n\n[reduced]')
    Path("card.toml").write_text(text)
    run("bench", "card.toml", "--panels", "one", "--seeds", "1", "--tune", "lr=0.1", "out=here")
    out = capsys.readouterr().out
    kept = json.loads(Path("here/protocol.json").read_text())
    ours = kept["hashes"]["mine.py:load"]
    said = f"the hash of mine.py:load is {ours}, the card's 00: these are other data"
    assert out.count(said) == 2  # before the run and below its table
    assert kept["notes"] == {"one": [said]}
    assert f"NOTE: {said}" in Path("here/protocol.txt").read_text()
    Path("here/protocol.json").write_text(json.dumps({**kept, "hashes": {"mine.py:load": "11"}}))
    run("bench", "--resume", "here")
    again = f"the hash of mine.py:load is {ours}, but it was 11 when this run began"
    assert again in capsys.readouterr().out
    kept = json.loads(Path("here/protocol.json").read_text())
    assert kept["hashes"] == {"mine.py:load": "11"}
    assert [note[:40] for note in kept["notes"]["one"]] == [said[:40], again[:40]]


def test_data_as_the_card_has_them_are_not_remarked_on(capsys: pytest.CaptureFixture[str]) -> None:
    card = CARD.replace('"mine.py:load"', '"digits"').replace('"mine.py:Net"', '"mlp"')
    Path("card.toml").write_text(card)
    words = ("--panels", "one", "--seeds", "1", "--tune", "lr=0.1", "out=here")
    assert run("bench", "card.toml", *words, "examples=100", "num-classes=2") in (0, 1)
    assert "NOTE" not in capsys.readouterr().out.partition("test: ")[0]
    kept = json.loads(Path("here/protocol.json").read_text())
    assert kept["hashes"] == {"digits": SOURCES["digits"].hash}  # of all of it
    assert kept["notes"] == {"one": []}
    runs = json.loads(Path("here/settings.json").read_text())["runs"]
    for r in runs:  # a plan has the hash of each partition
        job = Job.from_run_config(r["settings"])
        parts = partition(data_of(job).train_y, "iid", 3, job.seed)
        assert r["partition"] == partition_hash(parts)


@pytest.mark.parametrize("name", SAMPLED)
def test_every_card_starts(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("flwr_regs.experiments.data.sources.data_files.DOWNLOADS", "nowhere")
    assert run("bench", name, "--smoke", "out=here") == 0
    card = protocols.load(name)
    out = capsys.readouterr().out
    bench = json.loads(Path("here/bench.json").read_text())["bench"]
    assert bench["seeds"] == [card.seeds[0]]
    assert out.count("NOTE: ") == 2  # before the run and below its table
    synthetic = bench["settings"].get("synthetic", False)
    assert ("random records of their shape" in out) == synthetic
    methods = {row["method"] for row in rows("here")}
    of_panel = card.rows_of(card.panels[0])
    assert methods == {of_panel[0].name, of_panel[-1].name}


def test_the_cards_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("protocols") == 0
    out = capsys.readouterr().out
    for name in protocols.names():
        assert f"\n{name} " in out
    assert run("protocols", "card.toml") == 0
    assert "the source's final: FedAvg 50; Mine 60.5 ± 1.5" in capsys.readouterr().out
    assert run("protocols", "rfedavg-t1") == 0
    known = f"hashes of the data: mnist {SOURCES['mnist'].hash}, cifar10 not known"
    assert known in capsys.readouterr().out
