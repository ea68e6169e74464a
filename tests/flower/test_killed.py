"""A process that is killed in the middle of a round, and another one that goes on from its checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flwr_regs.server.checkpoint.checkpoint import latest
from tests.conftest import ROOT
from tests.flower.killed import METHODS


def process(*args: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.flower.killed", *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stderr=subprocess.PIPE)


def ended(run: subprocess.Popen[str]) -> None:
    _, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "EFL" else [pytest.mark.full]) for n in METHODS],
)
def test_killed_in_a_round_and_resumed_equals_the_unbroken_run(name: str, tmp_path: Path) -> None:
    """To the bit, each run in a process of its own; of the clients of round 3, one has trained."""
    marker, folder = tmp_path / "in-the-round", tmp_path / "checkpoints"
    whole = process(name, tmp_path / "whole.safetensors")
    killed = process(name, tmp_path / "killed.safetensors", folder, marker)
    try:
        for _ in range(2000):
            if marker.exists() or killed.poll() is not None:
                break
            time.sleep(0.1)
    finally:
        killed.kill()
        _, errors = killed.communicate()
    assert marker.exists(), errors
    assert not (tmp_path / "killed.safetensors").exists()
    assert latest(folder).round == 2
    ended(process(name, tmp_path / "resumed.safetensors", folder, "resume"))
    ended(whole)
    for kind in ("safetensors", "json"):
        found = (tmp_path / f"resumed.{kind}").read_bytes()
        assert found == (tmp_path / f"whole.{kind}").read_bytes()
    assert latest(folder).round == 5
