"""The commands, units and containers of docs/deployment.md: their flags exist."""

import argparse
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from flwr.app import Context, RecordDict
from flwr.cli.app import app as flwr_app
from flwr.clientapp import ClientApp
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from tests.conftest import ROOT, Watching
from tests.docs.test_tutorials import blocks

FILES = ROOT / "docs/examples/deployment"
PAGE = ROOT / "docs/deployment.md"
COMPOSE: dict[str, Any] = yaml.safe_load((FILES / "compose.yaml").read_text())


def unit(path: Path) -> dict[str, list[str]]:
    """The settings of a systemd unit: key -> values, in order."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value.strip())
    return found


def commands_of(page: Path) -> Iterator[list[str]]:
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            yield shlex.split(line, comments=True)


def started() -> Iterator[Any]:
    """(where, words) of each SuperLink and SuperNode that the page and its files start."""
    for words in commands_of(PAGE):
        if words[0] in PARSERS:
            yield pytest.param(words, id=f"page-{words[0]}")
    for path in sorted(FILES.glob("*.service")):
        (command,) = unit(path)["ExecStart"]
        yield pytest.param(shlex.split(command), id=path.name)
    for name, service in COMPOSE["services"].items():
        yield pytest.param(shlex.split(service["command"]), id=f"compose-{name}")


PARSERS = {"superlink": _parse_args_run_superlink, "supernode": _parse_args_run_supernode}
STARTED = list(started())


@pytest.mark.parametrize("words", STARTED)
def test_flower_accepts_the_command_and_calls_no_flag_of_it_old(words: list[str]) -> None:
    parser: argparse.ArgumentParser = PARSERS[Path(words[0]).name.removeprefix("flower-")]()
    parser.exit_on_error = False
    known = parser.parse_args([re.sub(r"^\$\{PORT\}$", "9400", w) for w in words[1:]])
    assert not getattr(known, "insecure", False)
    helps = {flag: a.help or "" for a in parser._actions for flag in a.option_strings}
    for flag in (w for w in words if w.startswith("--")):
        assert "eprecated" not in helps[flag], flag


FLWR = [w for w in commands_of(PAGE) if w[0] == "flwr"]


@pytest.mark.parametrize("words", FLWR, ids=" ".join)
def test_flwr_has_the_commands_and_options_of_the_page(words: list[str]) -> None:
    command: Any = typer.main.get_command(flwr_app)
    rest = words[1:]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    assert {w for w in rest if w.startswith("-")} <= options


def test_the_certificates_are_made_and_fit(tmp_path: Path) -> None:
    script = str(FILES / "certificates.sh")
    for _ in range(2):  # the second time with the authority that is there
        words = ["bash", script, "superlink.example.org", "192.0.2.10"]
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    check = ["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", "superlink.example.org"]
    for more in ([], ["-verify_ip", "192.0.2.10"]):
        done = subprocess.run([*check, *more, "server.crt"], cwd=tmp_path, capture_output=True)
        assert done.returncode == 0, done.stderr
    wrong = [*check[:-1], "other.example.org", "server.crt"]
    assert subprocess.run(wrong, cwd=tmp_path, capture_output=True).returncode != 0
    for key in ("ca.key", "server.key"):
        assert (tmp_path / key).stat().st_mode & 0o077 == 0
    ends = ["openssl", "x509", "-noout", "-in", "ca.crt", "-checkend"]
    done = subprocess.run([*ends, str(2 * 365 * 86400)], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0  # the authority outlives a certificate that is renewed


def test_the_app_refuses_what_would_cost_its_results_before_it_asks_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.syspath_prepend(str(FILES / "app"))
    settings = tomllib.loads((FILES / "app/pyproject.toml").read_text())["tool"]["flwr"]["app"]
    cases = {
        "Not a directory": {"out": str(tmp_path / "file" / "results")},
        "resume=true needs the checkpoint-dir": {"resume": True},
    }
    try:
        import server

        for words, given in cases.items():
            config = settings["config"] | given
            grid = Watching(ClientApp(), 2)
            with pytest.raises((OSError, ValueError), match=words):
                server.app(grid, Context(1, 1, {}, RecordDict(), config))
            assert not grid.kinds
        assert "alpha=0.5" in repr(server.strategy("FedFOR(0.5)"))
    finally:
        for name in ("server", "task"):
            sys.modules.pop(name, None)
