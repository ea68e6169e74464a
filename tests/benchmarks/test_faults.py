"""Faults are measured case by case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.faults import __main__ as faults


def test_a_case_is_kept_and_one_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(name: str, folder: Path) -> dict[str, object]:
        if name == "client_dies":
            raise RuntimeError("no federation")
        return {"sees": name, "seconds": 1.6, "lost": "nothing"}

    monkeypatch.setattr(faults, "play", play)
    out = tmp_path / "faults.json"
    assert faults.measure(["client_dies", "node_killed"], out) == ["client_dies"]
    assert faults.measure(["client_raises"], out) == []
    cases = json.loads(out.read_text())
    assert list(cases) == ["client_raises", "node_killed"]  # in the order of the cases
