"""What fifty commands print and exit with, as commands.txt keeps it.

``python -m tests.experiments.test_commands`` writes that file anew; read the difference before you commit.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flwr_regs.experiments import cli
from flwr_regs.experiments.report import drawing

KEPT = Path(__file__).with_name("commands.txt")
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
model = "logistic"
partition = "iid"
num-clients = 2
examples = 60
rounds = 2
local-steps = 2

[reduced]
rounds = 1

[methods]
FedAvg = "FedAvg"
Mine = {call = "mine.py:Slow", settings = {lr = 0.2}, panels = ["two"]}

[[panels]]
name = "two"
reports.final = {FedAvg = 50, Mine = [60.5, 1.5]}

[[panels]]
name = "one"
settings = {num-clients = 3}
"""
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
TINY = "rounds=2 num-clients=2 examples=60 local-steps=2 model=logistic"
COMMANDS = [
    "--version",
    "methods FedBN",
    "methods FedFORR",
    "protocols card.toml",
    "protocols lr=1",
    f"run {TINY} out=a --seeds 1,2",
    f"run {TINY} out=a",
    "run --resume a",
    "run --resume a lr=0.2",
    "run --resume a --seeds 3",
    "plot a",
    "plot a lr=1",
    "plot nowhere",
    "reproduce a --seeds 2",
    "reproduce a lr=1",
    f"run {TINY} lr=1e30 methods=FedAvg out=b",
    f"run {TINY} 'methods=FedAvg, mine.py:Bad' out=c",
    f"run {TINY} --dry-run",
    f"run {TINY} lr=.1 methods=FedAvg",
    f"run {TINY} dp-noise=2",
    "run lr=-1",
    "run learning-rate=1",
    "run fedfor-alpha=1",
    "run optimizer=Adam momentum=0.9",
    "run methods=fedavg",
    "run 'methods=FedFOR(alfa=1)'",
    "run methods=FedAvg,FedAvg",
    "run methods=FedBN model=mlp",
    "run partition=shards-mcmahan num-clients=2000",
    "run --app nowhere",
    "run --data-dir there",
    "walk",
    f"sweep lr --values 0.05,1e30 methods=FedAvg {TINY} --seeds 1 out=d",
    f"sweep mine.py:Slow.rate --values '0.1;0.5' methods=mine.py:Slow {TINY} --seeds 1 out=e",
    f"sweep -c 'x: lr=0.1' -c 'y: methods=FedAvg,FedFOR rounds=1' {TINY} --seeds 1 out=f",
    "sweep lr",
    "sweep -c 'x: seed=3'",
    f"bench {TINY} --seeds 1,2 out=g",
    f"bench {TINY} --seeds 1,2 --tune lr=0.02..2 --tune FedFOR.alpha=0.1,1 --trials 2 out=h",
    "run --resume h",
    "bench --resume h --dry-run",
    "bench --tune lr=2..1",
    "bench held-out-clients=2",
    "bench seed=3",
    "bench card.toml out=i",
    "bench --resume i",
    "bench card.toml --panels one --methods 'FedAvg, FedProx(mu=0.1)' lr=0.5 --seeds 1 out=j",
    "bench card.toml --smoke out=k",
    "bench card.toml --setting reduced --dry-run",
    "bench card.toml --panels tow",
    "bench fedadc-t2",
    "plot i",
    "plot partition partition=classes num-clients=10 out=l",
]


def outcome(line: str, folder: Path) -> str:
    """Return what a command prints and its status, without times, bits of layout and the folder's name."""
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
    lines = [re.sub(r" [\d.]+$", " #", re.sub(r"  +", "  ", t)) for t in text.splitlines()]
    lines = [t for t in lines if not re.search(r" round +\d+/\d+ ", t)]  # progress
    lines = [re.sub(r"^( ?[-─━]+)+$", "─", t).rstrip() for t in lines]
    return "\n".join([f"$ flwr-regs {line}", *lines, f"exit {status}", ""])


def outcomes() -> Iterator[str]:
    """Yield the outcome of each command, one after the other in one folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        os.chdir(folder)
        try:
            (folder / "card.toml").write_text(CARD)
            (folder / "mine.py").write_text(MINE)
            for line in COMMANDS:
                yield outcome(line, folder)
        finally:
            os.chdir(before)


def test_commands_print_and_exit_as_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "save", lambda *_: [])  # pictures take longer than runs
    kept = KEPT.read_text(encoding="utf-8").split("\n$ flwr-regs ")
    assert [*"\n".join(outcomes()).split("\n$ flwr-regs ")] == kept


if __name__ == "__main__":
    drawing.save = lambda *_: []  # type: ignore[assignment]
    KEPT.write_text("\n".join(outcomes()), encoding="utf-8")
