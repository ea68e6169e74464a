"""A seeded sample of a product of options: each option occurs, the rest is for ``-m full``.

A law is stated once. A product shows that it holds for options that could only meet by accident, so a
sample in which every option occurs finds what a product finds, if not as soon.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def covering(cells: Sequence[tuple[Any, ...]], seed: int) -> list[int]:
    """Return the places of some cells, in order: each value of each axis in `cells` occurs in one.

    Values count as the same if they are one object. The next cell taken is the one with most values
    that are not there yet; `seed` settles ties.
    """
    order = list(range(len(cells)))
    random.Random(seed).shuffle(order)
    values = [{(axis, id(value)) for axis, value in enumerate(cell)} for cell in cells]
    missing: set[tuple[int, int]] = set().union(*values)
    chosen = []
    while missing:
        chosen.append(max(order, key=lambda i: len(values[i] & missing)))
        missing -= values[chosen[-1]]
    return sorted(chosen)


def sampled(
    names: str,
    cells: Sequence[tuple[Any, ...]],
    seed: int,
    ids: Callable[[Any], str] = str,
    among: Callable[[tuple[Any, ...]], bool] = lambda cell: True,
) -> pytest.MarkDecorator:
    """Parametrize a test by `cells`; those outside a covering sample are marked ``full``.

    With one name the cell itself is the argument. `ids` names a value. The sample is drawn `among` some.
    """
    some = [i for i, cell in enumerate(cells) if among(cell)]
    chosen = {some[i] for i in covering([cells[i] for i in some], seed)}
    whole = "," not in names
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *([cell] if whole else cell),
                id="-".join(map(ids, cell)),
                marks=[] if i in chosen else [pytest.mark.full],
            )
            for i, cell in enumerate(cells)
        ],
    )
