"""The advice on packages that are missing."""

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from flwr_regs.experiments import extras

REQUIRES = [
    "torch>=2.7",
    "constriction<0.6; (platform_machine != 'aarch64') and extra == 'bench'",
    "matplotlib>=3.8; extra == 'bench'",
    'pandas ; extra == "bench"',
    "flwr[dp]; extra == 'privacy'",
]
MARKED = "constriction<0.6; (platform_machine != 'aarch64')"
PACKAGES = f'pip install "{MARKED}" "matplotlib>=3.8" pandas'


def test_the_command_names_the_packages_of_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = SimpleNamespace(requires=REQUIRES)
    monkeypatch.setattr(extras, "distribution", lambda _: installed)
    assert extras.install_command("bench") == PACKAGES
    assert extras.install_command("privacy") == 'pip install "flwr[dp]"'

    def absent(name: str) -> Any:  # the sources are on Python's path alone
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", absent)
    assert extras.install_command("bench") == 'pip install -e ".[bench]" in the clone'
