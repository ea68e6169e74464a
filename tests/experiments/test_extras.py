"""The advice on packages that are missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
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
