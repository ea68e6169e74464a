"""What commands print and exit with, as commands.txt keeps it; between them, the shell changes files.

``python -m tests.experiments.test_commands`` runs the commands that stand there, and writes the file anew:
read the difference before you commit it.
"""

import contextlib
import io
import math
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flwr_regs.experiments import cli
from flwr_regs.experiments.report import drawing
from flwr_regs.experiments.run import progress
from tests.experiments.test_user_code import OWN

KEPT = Path(__file__).with_name("commands.txt")
CARD = Path(__file__).with_name("card.toml").read_text(encoding="utf-8")


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
    text = re.sub(r"\b([\d.]+ h )?[\d.]+ (µs|ms|s|min)\b", "TIME", text)
    # what pandas and tarfile say differs from version to version
    text = re.sub(r"(?m)\b(ParserError|ReadError|EOFError): .*?(?=; expected|\)$)", r"\1", text)
    lines = [re.sub(r"  +", "  ", t) for t in text.splitlines()]
    if status != 2:
        lines = [
            re.sub(r" [\d.]+$", " #", t) for t in lines if not re.search(r" round +\d+/\d+ ", t)
        ]
    lines = [re.sub(r"^( ?[-─━]+)+$", "─", t).rstrip() for t in lines]
    return "\n".join([f"$ flwr-regs {line}", *lines, f"exit {status}", ""])


def outcomes() -> Iterator[str]:
    """Yield the outcome of each command of the file, one after the other in one folder.

    Its path has the same length each time, since lines are wrapped with it.
    """
    lines = re.findall(r"^\$ (.*)$", KEPT.read_text(encoding="utf-8"), re.M)
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.chdir(name),
        pytest.MonkeyPatch.context() as patch,
    ):
        Path("card.toml").write_text(CARD)
        Path("mine.py").write_text(OWN)
        for part in ("finish", "save"):  # pictures take longer than runs
            patch.setattr(drawing, part, lambda *_, **__: [])
        patch.setattr(progress, "PIPED", math.inf)  # nothing is told of what takes long
        for line in lines:
            yield outcome(line, Path.cwd())


def test_commands_print_and_exit_as_they_did() -> None:
    """And what is refused is one sentence."""
    kept = KEPT.read_text(encoding="utf-8").split("\n$ ")
    assert [*"\n".join(outcomes()).split("\n$ ")] == kept
    assert {outcome.rstrip().count("\n") for outcome in kept if "exit 2" in outcome} == {2}


if __name__ == "__main__":
    KEPT.write_text("\n".join([*outcomes()]), encoding="utf-8")
