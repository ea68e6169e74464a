"""What partitions change: noise, a long tail in each round, labels that swap."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from flwr_regs import simulate
from flwr_regs.experiments.data import datasets
from flwr_regs.experiments.models import models
from flwr_regs.experiments.partition import shifts


def test_a_clients_noise_has_its_variance() -> None:
    x = np.random.default_rng(0).normal(size=(500, 1, 8, 8)).astype(np.float32)
    for client in (0, 4, 9):
        added = shifts.noisy(x, client, 10, 0.5, 3) - x
        variance = 0.5 * (client + 1) / 10
        assert abs(added.mean()) < 4.5 * np.sqrt(variance / x.size)
        np.testing.assert_allclose(added.var(), variance, rtol=0.04)
    first, again, test = (shifts.noisy(x, 1, 10, 0.5, 3, part) for part in (0, 0, 1))
    assert first.dtype == np.float32
    assert np.array_equal(first, again)
    others = [shifts.noisy(x, *who) for who in ((2, 10, 0.5, 3), (1, 10, 0.5, 4))]
    for other in (test, *others):  # the test inputs', another client's, another seed's
        assert abs(np.corrcoef((first - x).ravel(), (other - x).ravel())[0, 1]) < 0.05
    with pytest.raises(ValueError, match="inputs of floats, not of uint8"):
        shifts.noisy(x.astype(np.uint8), 1, 10, 0.5, 3)


def test_a_round_has_a_long_tail_of_a_random_sample() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 200))
    for ratio, want in ((100.0, [200, 63, 20, 6, 2]), (50.0, [200, 75, 28, 11, 4])):
        rows = shifts.long_tail(labels, 0, 1, 0, share=1.0, ratio=ratio)
        assert len(set(rows)) == len(rows)
        assert sorted(np.bincount(labels[rows], minlength=5), reverse=True) == want
    first, seen = Counter[int](), np.zeros(1000)
    for server_round in range(1, 201):
        rows = shifts.long_tail(labels, 3, server_round, 0, share=0.2, ratio=10.0)
        first[int(np.bincount(labels[rows], minlength=5).argmax())] += 1
        seen[rows] += 1
    assert min(first.values()) > 20  # 40 expected of each class
    per_round = 0.2 * np.mean([10 ** (-i / 4) for i in range(5)])
    np.testing.assert_allclose(seen.mean() / 200, per_round, rtol=0.05)
    assert seen.max() < 18 + 5 * 4.3  # 18 expected: no example is preferred


def test_a_round_of_a_client_is_its_own_and_can_be_repeated() -> None:
    def drawn(*key: int) -> tuple[int, ...]:
        return tuple(shifts.long_tail(np.arange(600) % 3, *key, share=0.5, ratio=10.0))

    draws = {drawn(client, t, seed) for client in (0, 1) for t in (1, 2) for seed in (0, 1)}
    assert len(draws) == 8
    assert drawn(1, 2, 0) == drawn(1, 2, 0)
    assert drawn(1, 0, 0) == drawn(1, 1, 0)  # asked before training
    labels = np.array([4, 4, 9])
    few = shifts.long_tail(labels, 0, 1, 0, share=1.0, ratio=1e6)
    assert set(labels[few]) == {4, 9}  # at least one of each


def test_labels_swap_with_the_given_probability_and_stay() -> None:
    swaps = 0
    for seed in range(60):
        maps = [shifts.swapped(6, t, seed, 0.25) for t in range(21)]
        assert maps[0].tolist() == list(range(6))
        for before, after in pairwise(maps):
            assert sorted(after) == list(range(6))
            moved = int((before != after).sum())
            assert moved in (0, 2)
            swaps += moved == 2
    assert abs(swaps / 1200 - 0.25) < 4.5 * np.sqrt(0.25 * 0.75 / 1200)
    pairs = {tuple(np.flatnonzero(shifts.swapped(4, 1, s, 1.0) != np.arange(4))) for s in range(60)}
    assert len(pairs) == 6
    assert shifts.swapped(1, 9, 0, 1.0).tolist() == [0]


def test_the_server_tests_with_the_rounds_labels() -> None:
    """A model that never learns has the accuracy of the labels that the test data have in each round."""
    (run,) = simulate(
        methods="FedAvg",
        rounds=4,
        num_clients=2,
        local_steps=1,
        lr=1e-30,
        seeds=[5],
        partition="label-swaps-rounds",
        swap_probability=1.0,
    ).runs
    digits = datasets.load("digits")
    with torch.no_grad():
        outputs = models.build("digits", "auto", 5).eval()(torch.from_numpy(digits.test_x))
    said = outputs.argmax(1).numpy()
    for point in run.test:
        labels = shifts.swapped(10, point["round"], 5, 1.0)
        assert point["accuracy"] == pytest.approx((said == labels[digits.test_y]).mean())
    assert len({point["accuracy"] for point in run.test}) > 2
