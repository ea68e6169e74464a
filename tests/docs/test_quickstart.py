"""docs/quickstarts.md's diffs of an app with train and evaluate functions: they keep the app's loop."""

import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flwr_regs import InProcessGrid
from tests.conftest import ROOT

APP = Path(__file__).parent / "quickstart"
RUN = {
    "batch-size": 8,
    "local-epochs": 2,
    "fraction-evaluate": 1.0,
    "learning-rate": 0.05,
    "num-server-rounds": 4,
}
PAGE = ROOT / "docs/quickstarts.md"


def before() -> dict[str, str]:
    return {path.name: path.read_text() for path in APP.glob("*.py")}


def changed(files: dict[str, str], page: str) -> dict[str, str]:
    """Files with the diffs of a page: what a diff takes away occurs once."""
    for diff in re.findall(r"^(?:@@.*|```diff)\n([^@]+?)(?=^@@|^```)", page, re.M):
        old, new = (
            "".join(line[1:] for line in diff.splitlines(True) if line[0] in kept)
            for kept in (" -", " +")
        )
        (name,) = (name for name, text in files.items() if text.count(old) == 1)
        files[name] = files[name].replace(old, new)
    return files


def after(section: str) -> dict[str, str]:
    """The app with the diffs of one section of the page."""
    (text,) = (part for part in PAGE.read_text().split("\n## ") if part.startswith(section))
    return changed(before(), text)


def model_of(
    files: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """The final model of an app."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name in ("task", "client_app", "server_app"):
            patch.delitem(sys.modules, name, raising=False)
        client, server = (importlib.import_module(f"{side}_app") for side in ("client", "server"))
        for name in ("task", "client_app", "server_app"):
            del sys.modules[name]
    grid = InProcessGrid(client.app, 3, run_config=RUN)
    server.main(grid, SimpleNamespace(run_config=RUN))
    saved: dict[str, Any] = torch.load("final_model.pt")
    return saved


@pytest.mark.parametrize(
    ("section", "strength", "off"),
    [("FedFOR", "FedFOR(", "FedFOR(alpha=0.0, "), ("SlowMo", "beta=0.6", "beta=0.0")],
)
def test_the_loop_and_its_momentum_stay(
    section: str, strength: str, off: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a strength of 0, the changed app trains the model that it trained before."""
    with_it = after(section)
    neutral = {name: text.replace(strength, off) for name, text in with_it.items()}
    assert neutral != with_it
    before_it = model_of(before(), tmp_path / "before", monkeypatch)
    torch.testing.assert_close(model_of(neutral, tmp_path / "neutral", monkeypatch), before_it)
    trained = model_of(with_it, tmp_path / "changed", monkeypatch)
    assert any(not torch.allclose(trained[n], before_it[n]) for n in before_it)
