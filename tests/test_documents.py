"""The code and the commands in the documents run as they stand there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from flwr_regs.experiments import cli
from tests.conftest import ROOT


@pytest.mark.parametrize("page", ["own-method"])
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / f"docs/{page}.md").read_text(), re.M | re.S
    )
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, f"docs/{page}.md", "exec", dont_inherit=True), names)
    losses = [float(x) for x in re.findall(r"[\d.]+", capsys.readouterr().out)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


COMMANDS = [
    line
    for page in sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    for line in block.splitlines()
    if re.match(r"(\.venv/bin/)?flwr-regs ", line)
]
OWN = """
from dataclasses import dataclass
from typing import ClassVar

from flwr_regs import Term


@dataclass(frozen=True)
class Decay(Term):
    name: ClassVar[str] = "decay"
    rate: float

    def correct(self, grads, params, ctx):
        return {n: g + self.rate * params[n] for n, g in grads.items()}
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_documents_is_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings and methods are checked as for a run; nothing is trained."""
    (tmp_path / "my_module.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    monkeypatch.setattr("flwr_regs.experiments.sweep.sweep", lambda *_: None)
    monkeypatch.setattr(cli, "_run", lambda *_: 0)
    for folder in ("DIR", "/data"):
        command = command.replace(f"data-dir={folder}", f"data-dir={tmp_path}")
    assert cli.main([*shlex.split(command, comments=True)[1:], "--app", str(ROOT)]) == 0


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 15


def test_the_quickstarts_are_what_the_page_shows() -> None:
    """Each diff of the page gives consecutive lines of its example, and takes out none of them."""
    page = (ROOT / "docs/quickstarts.md").read_text()
    intro, *sections = re.split(r"^## ", page, flags=re.M)
    named = re.findall(r"flwr run docs/examples/(\S+) ", intro)
    assert len(named) == len(sections) == 4
    for name, section in zip(named, sections, strict=True):
        assert f"](examples/{name}/app.py)" in section
        app = (ROOT / f"docs/examples/{name}/app.py").read_text()
        diffs = re.findall(r"^```diff\n(.*?)^```", section, re.M | re.S)
        assert len(diffs) >= 3
        for diff in diffs:
            lines = diff.splitlines()
            assert "\n".join(x[1:] for x in lines if x[:1] != "-") in app, diff
            assert not [x for x in lines if x[:1] == "-" and x[1:] in app.splitlines()]
        imports = re.findall(r"^from flwr_regs import .*", app, re.M)
        assert len(imports) == 1
        assert name == "lightning" or f"+{imports[0]}" in section
