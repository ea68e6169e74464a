"""What partitions change: noise, a long tail in each round, labels that swap."""

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
    keys = [(1, 10, 0.5, 3), (9, 10, 0.5, 3), (1, 10, 0.5, 4), (1, 10, 0.5, 3, 1)]
    added = [shifts.noisy(x, *key) - x for key in keys]  # of clients, seeds, and test inputs
    for noise, (client, *_) in zip(added, keys, strict=True):
        variance = 0.5 * (client + 1) / 10
        assert abs(noise.mean()) < 4.5 * np.sqrt(variance / x.size)
        np.testing.assert_allclose(noise.var(), variance, rtol=0.04)
    correlated = np.corrcoef([noise.ravel() for noise in added])
    assert abs(correlated - np.eye(4)).max() < 0.05
    again = shifts.noisy(x, *keys[0])
    assert again.dtype == np.float32
    assert np.array_equal(again - x, added[0])
    with pytest.raises(ValueError, match="inputs of floats, not of uint8"):
        shifts.noisy(x.astype(np.uint8), 1, 10, 0.5, 3)


def test_a_round_has_a_long_tail_of_a_random_sample() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 200))
    for ratio, want in ((100.0, [200, 63, 20, 6, 2]), (1e6, [200, 6, 1, 1, 1])):
        rows = shifts.long_tail(labels, 0, 1, 0, share=1.0, ratio=ratio)
        assert len(set(rows)) == len(rows)
        assert sorted(np.bincount(labels[rows], minlength=5), reverse=True) == want
    draws = [shifts.long_tail(labels, 3, t, 0, share=0.2, ratio=10.0) for t in range(1, 201)]
    first = [np.bincount(labels[rows], minlength=5).argmax() for rows in draws]
    assert np.bincount(first, minlength=5).min() > 20  # 40 expected of each class
    seen = np.bincount(np.concatenate(draws), minlength=1000)
    per_round = 0.2 * np.mean([10 ** (-i / 4) for i in range(5)])
    np.testing.assert_allclose(seen.mean() / 200, per_round, rtol=0.05)
    assert seen.max() < 18 + 5 * 4.3  # 18 expected: no example is preferred

    def drawn(*key: int) -> tuple[int, ...]:
        return tuple(shifts.long_tail(labels, *key, share=0.5, ratio=10.0))

    keys = [(client, t, seed) for client in (0, 1) for t in (1, 2) for seed in (0, 1)]
    assert len({drawn(*key) for key in keys * 2}) == 8
    assert drawn(1, 0, 0) == drawn(1, 1, 0)  # asked before training


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
    shift = {"partition": "label-swaps-rounds", "swap_probability": 1.0, "seeds": [5]}
    short = {"rounds": 4, "num_clients": 2, "local_steps": 1, "lr": 1e-30}
    (run,) = simulate(methods="FedAvg", **shift, **short).runs
    digits = datasets.load("digits")
    with torch.no_grad():
        outputs = models.build("digits", "auto", 5).eval()(torch.from_numpy(digits.test_x))
    said = outputs.argmax(1).numpy()
    for point in run.test:
        labels = shifts.swapped(10, point["round"], 5, 1.0)
        assert point["accuracy"] == pytest.approx((said == labels[digits.test_y]).mean())
    assert len({point["accuracy"] for point in run.test}) > 2
