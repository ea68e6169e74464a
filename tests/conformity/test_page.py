"""The study of behaviours: its page holds what the results say, and its tasks are equal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import conformity as study
from benchmarks.common import filled
from benchmarks.conformity.behaviours import BEHAVIOURS
from benchmarks.conformity.libraries import LIBRARIES


def test_the_page_holds_what_the_results_say() -> None:
    found, page = study.read(), study.PAGE.read_text()
    assert set(found) == {(row.key, seed) for row, seed in study.runs()}
    assert filled(page, "conformity", study.tables(found)) == page, (
        "run `python -m benchmarks.conformity report`"
    )


def test_the_page_says_how_it_was_trained() -> None:
    page = " ".join(study.PAGE.read_text().split())
    assert f"{study.CLIENTS} clients, {study.COHORT} in each of {study.ROUNDS} rounds" in page
    assert f"{study.EPOCHS} local epochs in batches of {study.BATCH}" in page
    assert f"{study.LR[False]}; with momentum {study.MOMENTUM} it is {study.LR[True]}" in page
    assert f"the last {study.LAST} rounds" in page
    assert f"seeds {study.SEEDS[0]} to {study.SEEDS[-1]}" in page
    assert f"μ = {study.MU}" in page


def test_all_behaviours_have_a_row_in_the_study_and_on_the_page() -> None:
    rows = [row for members in study.GROUPS.values() for row in members]
    assert {b for row in rows for b in row.behaviours} == set(BEHAVIOURS)
    read = study.PAGE.read_text().split("## Where each was read")[1].split("\n## ")[0]
    assert [b for b in BEHAVIOURS if f"`{b}`" not in read] == []


def test_the_libraries_findings_are_of_the_pinned_versions() -> None:
    found = [(v["library"], v["method"]) for v in json.loads(study.LIBRARIES.read_text())]
    assert found == [(x.name, m) for x in LIBRARIES.values() for m in x.methods]
    page = study.PAGE.read_text()
    assert "pfl==0.6.0" in LIBRARIES["pfl"].packages
    assert "pfl 0.6.0" in page
    assert "fedjax==0.0.17" in LIBRARIES["fedjax"].packages
    assert "FedJAX 0.0.17" in page


def test_rows_share_all_but_what_they_are_compared_by() -> None:
    plain, x, _ = study.task(1, False, False)
    fast, z, _ = study.task(1, True, False)
    assert plain.cohorts == fast.cohorts
    assert np.array_equal(x, z)
    assert all(np.array_equal(a, fast.parameters[n]) for n, a in plain.parameters.items())
    assert sum(len(y) for _, y in plain.clients) == 1437
    assert {len(set(c)) for c in plain.cohorts} == {study.COHORT}


def test_a_finished_run_comes_out_again_and_half_a_line_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, path = study.Row("SCAFFOLD"), tmp_path / "runs.jsonl"
    assert study.train(row, 1) == pytest.approx(study.read()[row.key, 1], abs=0.02)
    done: list[int] = []
    monkeypatch.setattr(study, "runs", lambda: iter([(row, 1), (row, 2)]))
    monkeypatch.setattr(study, "train", lambda row, seed: done.append(seed) or 0.5)  # type: ignore[func-returns-value]
    study.measure(path)
    path.write_text(path.read_text()[:-9])
    study.measure(path)
    assert done == [1, 2, 2]
    assert study.read(path) == {(row.key, 1): 0.5, (row.key, 2): 0.5}


def test_an_interval_is_students_and_of_paired_differences() -> None:
    first, row = study.GROUPS["FedProx"][:2]
    n = len(study.SEEDS)
    found = {(first.key, s): 0.8 + 0.01 * s for s in study.SEEDS}
    found |= {(row.key, s): 0.8 + 0.01 * s - 0.02 + 0.01 * (s % 2) for s in study.SEEDS}
    d = np.array([-2.0 + s % 2 for s in study.SEEDS])
    apart = study.difference(found, row, first)
    assert apart is not None
    t = {8: 2.364624, 7: 2.446912, 6: 2.570582, 5: 2.776445}[n]
    assert apart == pytest.approx((d.mean(), t * d.std(ddof=1) / n**0.5), rel=1e-5)
    assert study.difference({**found, (row.key, 1): None}, row, first) is None
