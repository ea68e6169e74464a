"""A card of one's own, as someone meets it who has only read the documents."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from flwr_regs.experiments import cards_table, commands
from flwr_regs.experiments.cards import protocol_runs, protocols
from flwr_regs.experiments.report.results import BRIEF, Results
from flwr_regs.experiments.report.run_records import Run
from flwr_regs.experiments.run import engine
from flwr_regs.experiments.strategies import bare, client_class
from tests.conftest import ROOT
from tests.experiments.test_cli import run

CARD = "my cards/card.toml"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with two panels, in a folder whose name has a space."""
    monkeypatch.chdir(tmp_path)
    Path("my cards").mkdir()
    text = (ROOT / "docs/examples/own-card/card.toml").read_text()
    Path(CARD).write_text(text.replace("rounds = 20", "rounds = 2\nlocal-epochs = 1"))
    page = (ROOT / "docs/protocols.md").read_text()
    Path("mine.py").write_text(page.split("```python\n")[1].split("```")[0])


def test_what_it_says_to_do_can_be_pasted() -> None:
    said = cards_table.one(protocols.load(CARD), "", CARD)
    assert "flwr-regs bench 'my cards/card.toml'\n" in said
    assert "flwr-regs bench 'my cards/card.toml' --setting reduced\n" in said


@pytest.mark.full
def test_an_interrupted_card_is_resumed_as_a_whole_and_drawn_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as pressed:
        pressed.setattr(commands, "_train", interrupted)
        assert run("bench", CARD, "--seeds", "1", "--trials", "1", "out=my results") == 130
    here = Path("my results").resolve()
    assert f"flwr-regs bench --resume '{here}'\n" in capsys.readouterr().err
    assert run("bench", "--resume", str(here)) in (0, 1)
    assert (here / "protocol.txt").is_file()
    places = protocol_runs.places(here)
    assert len(places) == 2
    for place in places:
        (place / "accuracy.png").unlink()
    assert run("plot", str(here)) == 0
    assert all((place / "accuracy.png").is_file() for place in places)
    runs: list[Run] = commands.Plan.load(places[0]).recorded(places[0])
    long = "FedAvg(weighting='uniform')"
    assert len(long) > BRIEF
    first = [replace(r, label=long) if r.label == runs[0].label else r for r in runs]
    text = Results(first, baseline=long).text()
    assert "vs first" in text
    assert "FedAvg(weighting=" in text  # in one line: a long heading left three characters for it
    assert "vs FedAvg" in Results(runs, baseline="FedAvg").text()
    for path in (places[0] / "runs").iterdir():
        path.unlink()
    assert run("plot", str(places[0])) == 2
    assert f"{places[0]} has no runs yet" in capsys.readouterr().err
    (places[1] / "settings.json").unlink()  # its test has not begun
    assert protocol_runs.places(here) == places[:1]
    (places[0] / "settings.json").unlink()
    assert run("plot", str(here)) == 2
    assert "is still tuning" in capsys.readouterr().err


def test_a_smoke_test_finds_a_wrong_parameter_of_tuning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path(CARD)
    path.write_text(path.read_text().replace("Clip.norm=", "Clip.nrm="))
    assert run("bench", CARD, "--smoke") == 2
    err = capsys.readouterr().err
    assert "there is no argument 'nrm'; did you mean 'norm'" in err
    assert err.count("\n") == 1
    assert not Path("results").exists()


def test_the_pages_strategy_has_its_own_clients_and_equals_its_terms() -> None:
    page = (ROOT / "docs/own-method.md").read_text()
    code = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    (strategy,) = (block for block in code if "class MyMethod(" in block)
    imports = "from flwr_regs import RegClient, RegStrategy\n"
    Path("decay.py").write_text(code[0] + imports + strategy)
    terms = "decay.py:Decay(rate=0.1)+decay.py:LossWeights"
    line = [f"methods={terms}, decay.py:MyMethod(rate=0.1)", "rounds=2", "local-epochs=1"]
    assert run("run", *line, "out=here") == 0
    one, other = commands.Plan.load(Path("here")).recorded(Path("here"))
    assert one.accuracy == other.accuracy
    made = bare(other.label, str(Path.cwd()))[other.label]
    assert client_class(made).__qualname__ == "MyMethodClient"
    assert client_class(made).__module__ == type(made).__module__  # its own, not one made of terms


def test_torchs_call_for_issues_is_not_shown() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with engine.quiet():
            warnings.warn("There is a performance drop because of x", stacklevel=1)
            warnings.warn("another", stacklevel=1)
    assert [str(one.message) for one in seen] == ["another"]
