"""Which clients a round asks: seeded, and if wanted covering every class."""

from __future__ import annotations

import pytest

from flwr_regs.server.population.cohorts import CoverageError, class_covering_cohort, uniform_cohort


def test_cohorts_cover_every_class_and_are_seeded() -> None:
    counts = {c: [int(i in (c % 10, (c + 1) % 10)) for i in range(10)] for c in range(50)}
    drawn = [class_covering_cohort(counts, (3, t), 12) for t in range(40)]
    for cohort in drawn:
        assert len(set(cohort)) == 12
        assert {i for c in cohort for i in (c % 10, (c + 1) % 10)} == set(range(10))
    assert drawn == [class_covering_cohort(counts, (3, t), 12) for t in range(40)]
    assert len({tuple(c) for c in drawn}) == 40
    plain = [uniform_cohort(counts, (3, t), 12) for t in range(40)]
    assert any({i for c in p for i in (c % 10, (c + 1) % 10)} != set(range(10)) for p in plain)


def test_a_rare_cover_is_found() -> None:
    """Five clients of 200 hold a class each that no other does."""
    counts = {c: [1] + [int(c == 40 * i) for i in range(1, 5)] for c in range(1, 201)}
    cohort = class_covering_cohort({**counts, 40: [1, 1, 0, 0, 0]}, (0, 1), 6)
    assert {40, 80, 120, 160} <= set(cohort)
    assert len(cohort) == 6


def test_impossible_coverage_names_the_classes() -> None:
    with pytest.raises(CoverageError, match=r"no client holds any example of the classes \[1\]"):
        class_covering_cohort({0: [3, 0, 0], 1: [0, 0, 2]}, (0, 1), 2)
    with pytest.raises(CoverageError, match="found no cohort of 2 clients"):
        class_covering_cohort({c: [int(c == i) for i in range(3)] for c in range(3)}, (0, 1), 2)


def test_a_cover_is_found_where_greed_alone_fails() -> None:
    """Two clients hold everything between them; 201 others hold more new classes at first sight."""
    counts = {c: [1, 1, 0, 1, 1, 0] for c in range(201)}
    counts |= {201: [1, 1, 1, 0, 0, 0], 202: [0, 0, 0, 1, 1, 1]}
    assert class_covering_cohort(counts, (0, 1), 2) == [201, 202]
