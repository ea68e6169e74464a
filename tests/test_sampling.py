"""The samples: every option occurs, a seed gives one sample, and nothing of a product is lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.sampling import covering, sampled

ROWS = [f"row {i}" for i in range(7)]
COLUMNS = [object() for _ in range(4)]
PRODUCT = list(itertools.product(ROWS, COLUMNS, [True, False]))
HOLES = [(r, c) for i, r in enumerate(ROWS) for j, c in enumerate(COLUMNS) if (i + j) % 3]


@pytest.mark.parametrize("cells", [PRODUCT, HOLES, PRODUCT[:1], []], ids=len)
def test_every_value_of_every_axis_occurs(cells: list[tuple[Any, ...]]) -> None:
    want = [set(axis) for axis in zip(*cells, strict=True)]
    for seed in range(20):
        chosen = covering(cells, seed)
        assert chosen == sorted(set(chosen))
        assert [set(axis) for axis in zip(*(cells[i] for i in chosen), strict=True)] == want


def test_of_a_whole_product_as_many_as_its_longest_axis() -> None:
    assert {len(covering(PRODUCT, seed)) for seed in range(20)} == {7}


def test_a_seed_gives_one_sample_and_another_seed_another() -> None:
    assert covering(PRODUCT, 1) == covering(list(PRODUCT), 1)
    assert len({tuple(covering(PRODUCT, seed)) for seed in range(20)}) > 10


def test_what_is_not_in_the_sample_is_marked_and_all_there() -> None:
    (_, params) = sampled("row,column,flag", PRODUCT, 3, ids=lambda v: str(v)[:5]).args
    assert [p.values for p in params] == PRODUCT
    marked = [bool(p.marks) for p in params]
    assert [i for i, mark in enumerate(marked) if not mark] == covering(PRODUCT, 3)
    assert {m.name for p in params for m in p.marks} == {"full"}
    (_, whole) = sampled("pair", HOLES, 3).args
    assert [p.values for p in whole] == [(cell,) for cell in HOLES]
