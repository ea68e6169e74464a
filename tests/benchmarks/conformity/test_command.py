"""The command, from a driver's file to the exit status; and pfl and FedJAX themselves, if they install."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.conformity import cli, environments, host
from benchmarks.conformity.libraries import LIBRARIES
from benchmarks.conformity.loops import federate
from benchmarks.conformity.task import small_task
from tests.conftest import ROOT

EXAMPLE = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "conformity.md").read_text(), re.M | re.S
)[0]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE)
    return path


def test_the_pages_example_agrees_and_a_wrong_one_is_named(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, as libraries are."""
    out = tmp_path / "out.json"
    assert cli.main(["--module", f"{mine}:drive", "--methods", "FedAvg", "--json", str(out)]) == 0
    assert "FedAvg: agrees with the paper" in capsys.readouterr().out
    assert json.loads(out.read_text())[0]["agrees"]
    assert EXAMPLE.count("len(y) / total") == 1
    mine.write_text(EXAMPLE.replace("len(y) / total", '1 / len(task["cohorts"][0])'))
    words = ["--module", f"{mine}:drive", "--methods", "FedAvg", "--python", sys.executable]
    assert cli.main([*words, "--json", str(out)]) == 1
    assert "equals uniform: it gives all clients the same weight" in capsys.readouterr().out
    assert json.loads(out.read_text())[0]["behaviours"] == [["uniform"]]


def test_a_driver_that_fails_is_skipped_with_its_error(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.write_text("def drive(task):\n    raise KeyError('no such client')\n")
    assert cli.main(["--module", f"{mine}:drive", "--methods", "FedProx"]) == 2
    assert "FedProx: skipped: " in (found := capsys.readouterr().out)
    assert "failed: KeyError: 'no such client'" in found


def test_a_library_that_does_not_install_is_skipped_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[list[str]] = []

    def call(command: list[str], what: str, *_: Any) -> None:
        called.append(command)
        if "pip" in command:
            raise environments.CannotRun(f"{what} failed: no network")

    monkeypatch.setattr(environments, "_call", call)
    assert cli.main(["--library", "fedjax", "--folder", str(tmp_path)]) == 2
    found = capsys.readouterr().out
    assert "skipped: the installation of fedjax==" in found
    assert found.strip().endswith("failed: no network")
    assert [c[1:3] for c in called] == [["-m", "venv"], ["-m", "pip"]]


def test_an_environment_is_made_once_and_anew_if_it_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def call(command: list[str], *_: Any) -> None:
        made.append(command[2])
        if command[2] == "venv":
            Path(command[3]).mkdir(parents=True)

    monkeypatch.setattr(environments, "_call", call)
    python = environments.prepare("pfl", ("pfl==1",), tmp_path)
    assert environments.prepare("pfl", ("pfl==1",), tmp_path) == python
    assert made == ["venv", "pip"]
    assert environments.prepare("pfl", ("pfl==2",), tmp_path) != python
    (Path(python).parents[1] / "complete").unlink()
    assert environments.prepare("pfl", ("pfl==1",), tmp_path) == python
    assert made == ["venv", "pip"] * 3


def test_what_was_asked_wrongly_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="--library nobody: unknown; there are"):
        cli.main(["--library", "nobody"])
    with pytest.raises(SystemExit):
        cli.main(["--library", "pfl", "--methods", "FedSGD"])
    assert "unknown methods ['FedSGD']" in capsys.readouterr().err
    with pytest.raises(ImportError, match=r"a driver is path\.py:callable, got 'mine'"):
        host.load("mine")


def test_the_list_names_libraries_and_behaviours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    found = capsys.readouterr().out
    for word in (*LIBRARIES, "SCAFFOLD-1", "from-weights: it starts control variates"):
        assert word in found


def test_tasks_and_results_come_back_as_they_were(tmp_path: Path) -> None:
    task, path = small_task(), tmp_path / "file.npz"
    host.write_task(path, environments.as_dict(task, "SCAFFOLD"))
    found = host.read_task(path)
    assert found["weights"] == "uniform"
    assert found["cohorts"] == [list(c) for c in task.cohorts]
    for k, (x, y) in enumerate(task.clients):
        assert np.array_equal(found["clients"][k]["x"], x)
        assert np.array_equal(found["clients"][k]["y"], y)
    trace = federate(task, "FedAvg")
    host.write_result(path, {"models": trace.models, "points": trace.points})
    back = host.read_result(path)
    assert back["points"].keys() == trace.points.keys()
    for name, array in trace.models[-1].items():
        assert np.array_equal(back["models"][-1][name], array)
        assert np.array_equal(back["points"][4, 3][-1][name], trace.points[4, 3][-1][name])


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_does_what_the_page_says(library: str, tmp_path: Path) -> None:
    """Its packages are installed, or are in the cache from before; without a network it is skipped."""
    out = tmp_path / "out.json"
    cli.main(["--library", library, "--json", str(out)])
    rows = json.loads(out.read_text())
    if all("skipped" in row for row in rows):
        pytest.skip(rows[0]["skipped"])
    kept = json.loads((ROOT / "docs/studies/conformity-libraries.json").read_text())
    keys = ("library", "method", "agrees", "round", "client", "step", "behaviours")
    want = [{k: row[k] for k in keys} for row in kept if row["library"] == library]
    assert [{k: row.get(k) for k in keys} for row in rows] == want
