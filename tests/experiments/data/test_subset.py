"""Parts of data sets, and records that stand in for their files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flwr_regs.experiments.data import catalogue, subset
from flwr_regs.experiments.data import datasets as data

DIGITS = data.load("digits")
GROUPED = replace(
    DIGITS,
    groups=np.arange(len(DIGITS.train_y)) % 7,
    test_groups=np.arange(len(DIGITS.test_y)) % 7,
    coarse=DIGITS.train_y // 2,
)


def test_a_part_has_so_many_examples_of_so_many_classes() -> None:
    part = subset.reduced(DIGITS, 100, 3, 0)
    assert (len(part.train_y), len(part.test_y)) == (100, 20)
    assert {*part.train_y} == {*part.test_y} == {0, 1, 2}
    again = subset.reduced(DIGITS, 100, 3, 0)
    assert subset.fingerprint(part) == subset.fingerprint(again)


def test_groups_have_equal_shares_and_everything_stays_together() -> None:
    with pytest.warns(UserWarning, match="keeps 60 of 1437 .* the first 3 of 7 groups"):
        part = subset.reduced(GROUPED, 60, 0, 3)
    assert np.bincount(part.groups).tolist() == [20, 20, 20]
    assert (part.coarse == part.train_y // 2).all()
    for x, y, group in zip(part.train_x[:5], part.train_y[:5], part.groups[:5], strict=True):
        (row,) = np.flatnonzero((DIGITS.train_x == x).all(axis=(1, 2, 3)))[:1]
        assert (DIGITS.train_y[row], row % 7) == (y, group)
    for x, group in zip(part.test_x, part.test_groups, strict=True):
        assert np.flatnonzero((DIGITS.test_x == x).all(axis=(1, 2, 3)))[0] % 7 == group


@pytest.mark.parametrize("name", ["synthetic", "emnist", "cifar10", "shakespeare"])
def test_records_have_the_shape_of_the_data_set(name: str) -> None:
    examples, classes = data.two_examples(name)
    made = subset.records(name)
    assert made.train_x.shape == (subset.RECORDS, *examples.shape[1:])
    assert made.train_x.dtype == examples.dtype
    assert made.train_y.max() < classes
    assert made.groups is not None
    assert len(np.unique(made.groups)) == subset.GROUPS
    for group in range(subset.GROUPS):  # each has all classes
        assert {*made.train_y[made.groups == group]} == {*made.train_y}


def test_a_hash_changes_with_any_number_and_any_order() -> None:
    whole = subset.fingerprint(DIGITS)
    assert whole == catalogue.SOURCES["digits"].hash
    other = DIGITS.train_y.copy()
    other[0] += 1
    assert subset.fingerprint(replace(DIGITS, train_y=other)) != whole
    assert subset.fingerprint(replace(DIGITS, train_x=DIGITS.train_x[::-1])) != whole
    assert subset.fingerprint(GROUPED) != whole
