"""What a user installs: the metadata, the citation, and the advice on packages that are missing."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

import flwr_regs
from flwr_regs.experiments import extras
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = (ROOT / "CITATION.cff").read_text()
REQUIRES = [
    "torch>=2.7",
    "flwr[simulation]; extra == 'simulation'",
    "matplotlib>=3.8; extra == 'simulation'",
    'pandas ; extra == "simulation"',
    "flwr[dp]; extra == 'privacy'",
]


def installed(monkeypatch: pytest.MonkeyPatch, origin: str | None) -> None:
    """Let the package be installed with this ``direct_url.json``."""

    class Found:
        requires = REQUIRES

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return origin

    def distribution(name: str) -> Any:
        assert name == "flwr-regs"
        return Found()

    monkeypatch.setattr(extras, "distribution", distribution)


def test_a_clone_is_installed_again_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, '{"dir_info": {"editable": true}, "url": "file:///home/me/my%20clone"}')
    assert extras.install_command("privacy") == 'pip install -e "/home/me/my clone[privacy]"'


@pytest.mark.parametrize(
    "origin",
    [
        None,  # from an index
        '{"archive_info": {}, "url": "file:///tmp/flwr_regs-0.1.0-py3-none-any.whl"}',
        '{"dir_info": {}, "url": "file:///home/me/clone"}',  # pip install .
        '{"dir_info": {"editable": false}, "url": "file:///home/me/clone"}',
    ],
)
def test_elsewhere_the_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, origin: str | None
) -> None:
    installed(monkeypatch, origin)
    expected = 'pip install "flwr[simulation]" "matplotlib>=3.8" pandas'
    assert extras.install_command("simulation") == expected
    assert extras.install_command("privacy") == 'pip install "flwr[dp]"'
    with pytest.raises(ValueError, match="flwr-regs has no extra 'simulatoin'"):
        extras.install_command("simulatoin")


def test_sources_on_the_path_have_no_clone_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", distribution)
    assert extras.install_command("lora") == 'pip install -e ".[lora]" in the clone'


def test_no_message_advises_a_name_that_is_not_published() -> None:
    for path in (ROOT / "flwr_regs").rglob("*.py"):
        assert not re.search(r"pip install .?flwr-regs", path.read_text()), path


def test_all_say_the_same_version() -> None:
    cited = re.search(r"^version: (.+)$", CITATION, re.MULTILINE)
    assert cited is not None
    assert cited[1] == PROJECT["version"] == flwr_regs.__version__


def test_the_citation_names_the_papers_as_the_methods_files_do() -> None:
    titles = re.findall(r'^    title: "(.+)"$', CITATION, re.MULTILINE)
    assert len(titles) >= 11
    files = (ROOT / "flwr_regs" / "methods").glob("*.py")
    text = " ".join(" ".join(path.read_text().split()) for path in files).lower()
    assert [title for title in titles if f'"{title.lower()}"' not in text] == []


@pytest.mark.parametrize("name", ["run", "full"])
def test_the_workflow_calls_ci(name: str) -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert f"run: bash .ci/{name}\n" in workflow
    assert (ROOT / ".ci" / name).is_file()


def test_ci_finds_the_readmes_test_command() -> None:
    """`.ci/run` calls it, and stops if no line, or more than one, is it."""
    (pattern,) = re.findall(r"grep -E '(.*)' README.md", (ROOT / ".ci" / "run").read_text())
    (command,) = re.findall(pattern, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command.endswith("python -m pytest")
