"""The code and the commands in the documents run as they stand there."""

import re
import shlex
import sys
from contextlib import nullcontext
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from flwr_regs.experiments import cli, commands
from flwr_regs.experiments.cards import card_files, choices
from flwr_regs.experiments.experiment import Experiment
from flwr_regs.experiments.run import costs
from tests.conftest import ROOT
from tests.experiments.test_user_code import OWN

TUTORIALS = [
    *("own-method", "protocols"),
    *("tutorials/comparison", "tutorials/deploy", "tutorials/fedfor"),
]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page, without the lines of three backticks."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.full
@pytest.mark.parametrize("name", TUTORIALS)
def test_the_code_of_a_tutorial_runs_from_top_to_bottom(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tutorial = ROOT / f"docs/{name}.md"
    torch.set_num_threads(1)  # small models
    names: dict[str, Any] = {}
    code = blocks(tutorial, "python")
    assert code
    for block in code:
        exec(compile(block, tutorial.name, "exec", dont_inherit=True), names)
    printed = capsys.readouterr().out
    if tutorial.stem == "own-method":
        losses = [float(x) for x in re.findall(r"[\d.]+", printed)]
        assert len(losses) == 3
        assert losses[-1] < losses[0]
    if tutorial.stem == "fedfor":
        claimed, found = (
            float(re.search(r"accuracy ([\d.]+)%", text).group(1))  # type: ignore[union-attr]
            for text in (tutorial.read_text(), printed)
        )
        assert abs(claimed - found) < 2  # processors differ


COMMANDS = [
    line
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if re.match(r"(\.venv/bin/)?flwr-regs ", line)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_documents_is_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings and methods are checked as for a run; nothing is trained."""
    (tmp_path / "my_module.py").write_text(OWN)
    example = ROOT / "docs/examples/own-comparison/mine.py"
    (tmp_path / "mine.py").write_text(example.read_text())
    decay = blocks(ROOT / "docs/own-method.md", "python")[0]
    (tmp_path / "decay.py").write_text(decay)
    card = ROOT / "docs/examples/own-card/card.toml"
    (tmp_path / "card.toml").write_text(card.read_text())
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # as in a clone
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    monkeypatch.setattr(commands, "_train_panel", lambda *_: (0, None))
    monkeypatch.setattr(commands, "_report_card", lambda *_: None)
    monkeypatch.setattr(card_files, "save", lambda *_: None)  # it loads the data
    monkeypatch.setattr(commands, "locked", nullcontext)  # so there is no folder
    monkeypatch.setattr(Experiment, "checked", partialmethod(Experiment.checked, data=False))
    monkeypatch.setattr(choices, "with_notes", lambda experiment: experiment)
    monkeypatch.setattr(costs, "measure", lambda _: "")
    for folder in ("DIR", "/data"):
        command = command.replace(f"data-dir={folder}", f"data-dir={tmp_path}")
    line = shlex.split(command, comments=True)[1:]
    if {"plot", "reproduce", "--resume", "--verify"} & {*line}:  # of results that the reader has
        cli._parser().parse_args(line)
    else:
        assert cli.main(line) == 0
