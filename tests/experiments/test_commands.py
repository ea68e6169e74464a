"""What commands print and exit with, as commands.txt keeps it; between them, the shell changes files.

``python -m tests.experiments.test_commands`` runs the commands that stand there, and writes the file anew:
read the difference before you commit it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flwr_regs.experiments import cli
from flwr_regs.experiments.report import drawing

KEPT = Path(__file__).with_name("commands.txt")
PROGRESS = r" round +\d+/\d+ "
CARD = Path(__file__).with_name("card.toml").read_text(encoding="utf-8")
MINE = """
from dataclasses import dataclass
from typing import ClassVar
from flwr_regs import Term

@dataclass(frozen=True)
class Slow(Term):
    name: ClassVar[str] = "slow"
    rate: float = 0.5
    def correct(self, grads, params, ctx):
        return {n: self.rate * g for n, g in grads.items()}

class Bad(Term):
    name = "bad"
    def correct(self, grads, params, ctx):
        raise KeyError("x")
"""


def outcome(line: str, folder: Path) -> str:
    """Return what a command prints and its status, without times, bits of layout and the folder's name."""
    line, is_ours = line.removeprefix("flwr-regs "), line.startswith("flwr-regs ")
    if not is_ours:
        done = subprocess.run(line, shell=True, check=True, capture_output=True, text=True)
        return f"$ {line}\n{done.stdout}"
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as error,
    ):
        try:
            status = cli.main(shlex.split(line))
        except SystemExit as end:
            status = int(end.code or 0)
    text = out.getvalue() + error.getvalue()
    text = re.sub(r"results/[\d-]+", "results/TIME", text.replace(str(folder), "FOLDER"))
    text = re.sub(rf"{tempfile.gettempdir()}/flwr-regs-\w+", "TEMPORARY", text)
    text = re.sub(r"\b[\d.]+(e-\d+)? (ms|s|min)\b", "TIME", text)
    lines = [re.sub(r"  +", "  ", t) for t in text.splitlines()]
    if status != 2:
        lines = [re.sub(r" [\d.]+$", " #", t) for t in lines if not re.search(PROGRESS, t)]
    lines = [re.sub(r"^( ?[-─━]+)+$", "─", t).rstrip() for t in lines]
    return "\n".join([f"$ flwr-regs {line}", *lines, f"exit {status}", ""])


def outcomes() -> Iterator[str]:
    """Yield the outcome of each command of the file, one after the other in one folder."""
    lines = re.findall(r"^\$ (.*)$", KEPT.read_text(encoding="utf-8"), re.M)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        os.chdir(folder)
        try:
            (folder / "card.toml").write_text(CARD)
            (folder / "mine.py").write_text(MINE)
            for line in lines:
                yield outcome(line, folder)
        finally:
            os.chdir(before)


def test_commands_print_and_exit_as_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is refused is one sentence."""
    monkeypatch.setattr(drawing, "save", lambda *_, **__: [])  # pictures take longer than runs
    kept = KEPT.read_text(encoding="utf-8").split("\n$ ")
    assert [*"\n".join(outcomes()).split("\n$ ")] == kept
    assert {outcome.rstrip().count("\n") for outcome in kept if "exit 2" in outcome} == {2}


if __name__ == "__main__":
    drawing.save = lambda *_, **__: []  # type: ignore[assignment]
    KEPT.write_text("\n".join([*outcomes()]), encoding="utf-8")
