"""The window of supported versions: pyproject.toml, uv.lock, docs/versions.md and CI say the same."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from tests.conftest import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXT = (ROOT / "uv.lock").read_text()
LOCK: dict[str, Any] = tomllib.loads(TEXT)
PAGE = (ROOT / "docs" / "versions.md").read_text()
WINDOW = {
    name: (lowest, newest)
    for name, lowest, newest in re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
}


def locked(name: str) -> Version:
    """The newest locked version: there may be one for each Python."""
    return max(Version(p["version"]) for p in LOCK["package"] if p["name"] == name)


def test_the_window_is_that_of_pyproject_and_the_lock() -> None:
    assert list(WINDOW) == ["Python", "flwr", "torch", "numpy"]
    required = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    required["Python"] = Requirement(f"python{PROJECT['requires-python']}").specifier
    for name, (lowest, newest) in WINDOW.items():
        (bound,) = [s.version for s in required[name] if s.operator == ">="]
        assert lowest == bound, name
        assert Version(newest) in required[name], name
        assert name == "Python" or Version(newest) == locked(name), name


def test_the_lock_is_of_this_pyproject() -> None:
    """``uv lock --check`` also compares versions; it needs an index."""
    (own,) = [p for p in LOCK["package"] if p["name"] == PROJECT["name"]]
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(r for group in extras.values() for r in group)]
    names = {r.name for r in map(Requirement, wanted)} - {PROJECT["name"]}
    assert {r["name"] for r in own["metadata"]["requires-dist"]} - {PROJECT["name"]} == names
    stated = {
        (r["name"], str(Requirement(f"x{r['specifier']}").specifier))
        for r in own["metadata"]["requires-dist"]
        if "specifier" in r
    }
    assert {(r.name, str(r.specifier)) for r in map(Requirement, wanted) if r.specifier} == stated
    assert LOCK["requires-python"] == PROJECT["requires-python"]


def test_the_lock_names_the_public_index_alone() -> None:
    assert set(re.findall(r"https?://([^/\"]+)", TEXT)) == {"pypi.org", "files.pythonhosted.org"}


def test_ci_runs_the_lowest_and_the_newest() -> None:
    lowest, newest = WINDOW["Python"]
    full = (ROOT / ".ci" / "full").read_text()
    assert "--resolution lowest-direct" in full
    assert "sync -q --locked --extra dev" in full
    assert f"python{newest}" in full
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    each_time, weekly = workflow.split("  weekly:")
    assert f'python-version: "{lowest}"' in each_time
    assert re.findall(r"^ +(3\.\d+)$", weekly, re.M) == [newest, lowest]
