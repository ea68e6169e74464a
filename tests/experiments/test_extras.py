"""The advice on packages that are missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from flwr_regs.experiments import extras

REQUIRES = [
    "torch>=2.7",
    "flwr[simulation]; extra == 'simulation'",
    "matplotlib>=3.8; extra == 'simulation'",
    'pandas ; extra == "simulation"',
    "flwr[dp]; extra == 'privacy'",
]
CLONE = '{"dir_info": {"editable": true}, "url": "file:///home/me/my%20clone"}'
WHEEL = '{"archive_info": {}, "url": "file:///tmp/flwr_regs-0.1.0-py3-none-any.whl"}'
COPIED = '{"dir_info": {}, "url": "file:///home/me/clone"}'
PACKAGES = 'pip install "flwr[simulation]" "matplotlib>=3.8" pandas'


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (CLONE, 'pip install -e "/home/me/my clone[simulation]"'),
        (None, PACKAGES),  # from an index
        (WHEEL, PACKAGES),
        (COPIED, PACKAGES),  # pip install .
        ("absent", 'pip install -e ".[simulation]" in the clone'),
    ],
)
def test_the_command_suits_how_the_package_is_installed(
    origin: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`origin` is its ``direct_url.json``; absent: the sources are on Python's path alone."""

    def distribution(name: str) -> Any:
        if origin == "absent":
            raise PackageNotFoundError(name)
        return SimpleNamespace(requires=REQUIRES, read_text={"direct_url.json": origin}.get)

    monkeypatch.setattr(extras, "distribution", distribution)
    assert extras.install_command("simulation") == command
