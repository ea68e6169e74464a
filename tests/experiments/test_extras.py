"""The advice on packages that are missing."""

from __future__ import annotations

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
CLONE = '{"dir_info": {"editable": true}, "url": "file:///home/me/my%20clone"}'
WHEEL = '{"archive_info": {}, "url": "file:///tmp/flwr_regs-0.1.0-py3-none-any.whl"}'
COPIED = '{"dir_info": {}, "url": "file:///home/me/clone"}'
MARKED = "constriction<0.6; (platform_machine != 'aarch64')"
PACKAGES = f'pip install "{MARKED}" "matplotlib>=3.8" pandas'


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (CLONE, 'pip install -e "/home/me/my clone[bench]"'),
        (None, PACKAGES),  # from an index
        (WHEEL, PACKAGES),
        (COPIED, PACKAGES),  # pip install .
        ("absent", 'pip install -e ".[bench]" in the clone'),
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
    assert extras.install_command("bench") == command
