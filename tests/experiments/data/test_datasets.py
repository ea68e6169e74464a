"""Parts of data sets, and records that stand in for their files."""

import numpy as np
import pytest

from flwr_regs.experiments.data import datasets as data

DIGITS = data.load("digits")


def test_a_part_has_so_many_examples_of_so_many_classes() -> None:
    part, again = (data.reduced(DIGITS, 100, 3) for _ in range(2))
    assert (len(part.train_y), len(part.test_y)) == (100, 20)
    assert {*part.train_y} == {*part.test_y} == {0, 1, 2}
    assert part.hash == again.hash


def test_a_part_is_of_all_groups_and_everything_stays_together() -> None:
    """Each example's input, label, group and superclass are the same number, or follow from it."""
    x, y = (np.arange(n, dtype=np.float32)[:, None] for n in (700, 140))
    labels = np.arange(700) % 10
    train = {"train_x": x, "train_y": labels, "groups": np.arange(700) % 7, "coarse": labels // 2}
    test = {"test_x": y, "test_y": labels[:140], "test_groups": np.arange(140) % 7}
    part = data.reduced(data.Data(**train, **test), 140, 0)
    assert min(np.bincount(part.groups)) > 10
    rows, test_rows = (inputs[:, 0].astype(int) for inputs in (part.train_x, part.test_x))
    assert (part.train_y == rows % 10).all()
    assert (part.groups == rows % 7).all()
    assert (part.coarse == rows % 10 // 2).all()
    assert (part.test_groups == test_rows % 7).all()


@pytest.mark.parametrize("name", ["synthetic", "emnist", "cifar10", "shakespeare"])
def test_records_have_the_shape_of_the_data_set(name: str) -> None:
    examples, classes = data.two_examples(name)
    made = data.records(name)
    assert made.train_x.shape == (data.RECORDS, *examples.shape[1:])
    assert made.train_x.dtype == examples.dtype
    kinds = {*zip(made.train_y.tolist(), made.groups.tolist(), strict=True)}
    assert len(kinds) == min(classes, data.CLASSES) * data.GROUPS  # each group has all classes
