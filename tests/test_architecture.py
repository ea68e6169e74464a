"""docs/architecture.md says what is there: each file and name of its tables, and the picture's layers."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
STEPS = re.findall(r"^\| `([\w/]+\.py)` \| (.+?) \| (?:server|client) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("file", "text"), STEPS, ids=[f"{i}" for i in range(len(STEPS))])
def test_each_step_of_a_parameters_way_is_there(file: str, text: str) -> None:
    tree = ast.parse((ROOT / "flwr_regs" / file).read_text())
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    first = re.match(r"`(\w+)`", text)
    assert first is not None
    assert first[1] in defined


def test_a_parameters_way_is_long_enough_to_be_one() -> None:
    assert len(STEPS) == 12


def test_every_file_is_in_the_list_of_files() -> None:
    listing = PAGE.split("```")[1]
    for path in (ROOT / "flwr_regs").rglob("*.py"):
        folder = path.relative_to(ROOT / "flwr_regs").parts[0]
        if path.stem != "__init__" and folder not in ("methods", "experiments"):
            assert re.search(rf"\b{path.stem}\b", listing), path


def test_every_folder_says_what_it_knows_and_must_not_know() -> None:
    folders = [p.parent for p in (ROOT / "flwr_regs").rglob("__init__.py")][1:]
    assert len(folders) == 11
    for folder in folders:
        doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert re.search(r"\b[Kk]nows\b", doc), folder
        assert re.search(r"[Mm]ust not|No other folder may", doc), folder
        assert len(doc.splitlines()) <= 7, folder


def test_the_picture_draws_the_linters_layers(tmp_path: Path) -> None:
    house = runpy.run_path(str(ROOT / "docs" / "figures" / "house.py"))
    drawn = [name for row in house["layers"]() for name in row]
    folders = [p.name for p in (ROOT / "flwr_regs").iterdir() if (p / "__init__.py").is_file()]
    assert sorted(drawn) == sorted([*folders, "chain", "term", "abilities", "hook_contexts"])
    assert set(house["LOADS"]) == set(drawn)
    house["draw"](tmp_path / "house.png")
    assert (tmp_path / "house.png").stat().st_size > 10_000
