"""The advice on packages that are missing."""

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flwr_regs.experiments import cli, extras

REQUIRES = [
    "torch>=2.7",
    "matplotlib>=3.8; extra == 'bench'",
    'pandas ; extra == "bench"',
    "flwr[dp]; extra == 'privacy'",
]


def test_the_command_names_the_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = SimpleNamespace(requires=REQUIRES)
    monkeypatch.setattr(extras, "distribution", lambda _: installed)
    assert extras.install_command("matplotlib", "bench") == 'pip install "matplotlib>=3.8"'
    assert extras.install_command("dp-accounting", "privacy") == 'pip install "flwr[dp]"'

    def absent(name: str) -> Any:  # the sources are on Python's path alone
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", absent)
    assert extras.install_command("rich", "bench") == 'pip install -e ".[bench]" in the clone'


def test_a_missing_library_of_pictures_is_found_before_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["run", "methods=FedAvg", "rounds=1", f"out={tmp_path / 'out'}"]) == 2
    assert "drawing the results needs matplotlib: pip install" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
