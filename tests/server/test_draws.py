"""Draws for many clients at once against numpy's own, one client at a time."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_regs.server.population.draws import uniforms

CLIENTS = [0, 1, 2, 77, 2**16, 2**31, 2**32 - 1, 2**32, 2**63 + 17, 2**64 - 1]


@pytest.mark.parametrize("key", [(0, 0), (7, 3), (5,), (2**40, 5), (1, 2, 3, 4), (2**127 + 9, 4)])
@pytest.mark.parametrize("purpose", [(), (1,), (2, 3), (2, 2**33)])
def test_uniforms_are_numpys(key: tuple[int, ...], purpose: tuple[int, ...]) -> None:
    seeds = [np.random.SeedSequence((*key, c), spawn_key=purpose) for c in CLIENTS]
    assert uniforms(CLIENTS, key, purpose).tolist() == [
        np.random.default_rng(seed).random() for seed in seeds
    ]


def test_many_clients_in_any_order() -> None:
    clients = [*range(500, 0, -1), *range(2**35, 2**35 + 50)]
    seeds = [np.random.SeedSequence((3, c)) for c in clients]
    expected = [np.random.default_rng(seed).random() for seed in seeds]
    assert uniforms(clients, (3,)).tolist() == expected
    assert uniforms([], (3,)).tolist() == []


@pytest.mark.parametrize(("clients", "key"), [([-1], (1,)), ([1], (-1,)), ([2**64], (1,))])
def test_negative_and_longer_numbers_are_refused(clients: list[int], key: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"negative|2\^64"):
        uniforms(clients, key)
