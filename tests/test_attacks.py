"""The study of hostile clients: its page holds what the results say, and its attacks are attacks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import attacks
from benchmarks.common import filled
from tests.conftest import ROOT


def test_the_page_holds_what_the_results_say() -> None:
    found, page = attacks.read(), attacks.PAGE.read_text()
    assert set(found) == set(attacks.runs())
    assert filled(page, "attacks", attacks.tables(found)) == page
    assert len(re.findall("<!-- attacks: ", page)) == len(attacks.tables(found))


def test_the_page_says_how_it_was_trained() -> None:
    page = " ".join((ROOT / "docs/robustness.md").read_text().split())
    lr, steps = attacks.TRAIN["lr"], attacks.TRAIN["local-steps"]
    assert f"each of {attacks.ROUNDS} rounds, {steps} local steps with learning rate {lr}" in page
    assert (attacks.HOSTILE, attacks.CLIENTS, len(attacks.SEEDS)) == (2, 10, 3)


def test_a_flipped_update_is_turned_round_and_longer() -> None:
    rng, base = np.random.default_rng(1), np.array([1.0, 2.0])
    found = attacks.changed("flip", "w", np.array([1.5, 1.75]), base, rng)
    np.testing.assert_allclose(found - base, [-5.0, 2.5])
    noise = attacks.changed("noise", "U.w", np.full(1000, 0.1), 0.0, rng)
    assert (noise >= 0).all()
    assert np.sqrt(np.mean(noise**2)) == pytest.approx(1.0, rel=0.1)


def test_labels_are_flipped_for_the_hostile_clients_alone() -> None:
    seed = attacks.SEEDS[0]
    liars = attacks.hostile(seed)
    honest, flipped = attacks.loaders(seed, set()), attacks.loaders(seed, liars)
    for k in range(attacks.CLIENTS):
        mine, other = honest[k].dataset.tensors[1], flipped[k].dataset.tensors[1]  # type: ignore[attr-defined]
        assert bool((mine == (9 - other if k in liars else other)).all())


def test_a_study_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [("FedAvg", "Mean()", attack, 1) for attack in ("none", "claim")]
    monkeypatch.setattr(attacks, "runs", lambda: iter(keys))
    monkeypatch.setattr(attacks, "ROUNDS", 1)
    path = tmp_path / "runs.jsonl"
    attacks.measure(path)
    text = path.read_text()
    path.write_text(text[:-9])
    attacks.measure(path)
    assert [line["attack"] for line in attacks.read(path).values()] == ["none", "claim"]
    assert set(attacks.read(path)) == set(keys)
