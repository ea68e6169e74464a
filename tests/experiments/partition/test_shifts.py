"""What partitions change: noise, a long tail in each round, labels that swap; and how a job applies it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.partition import client_data, shifts
from flwr_regs.experiments.partition.client_data import ClientData, client_data_of
from flwr_regs.experiments.settings import Settings
from tests.experiments.runs import examples_of, runs_of

Array = np.ndarray[Any, Any]


def job_of(**settings: Any) -> Settings:
    return Settings.of(
        {"methods": "FedAvg", **{k.replace("_", "-"): v for k, v in settings.items()}}
    )


# noise


def test_a_clients_noise_has_its_variance() -> None:
    x = np.random.default_rng(0).normal(size=(500, 1, 8, 8)).astype(np.float32)
    for client in (0, 4, 9):
        added = shifts.noisy(x, client, 10, 0.5, 3) - x
        variance = 0.5 * (client + 1) / 10
        assert abs(added.mean()) < 4.5 * np.sqrt(variance / x.size)
        np.testing.assert_allclose(added.var(), variance, rtol=0.04)
        assert shifts.noisy(x, client, 10, 0.5, 3).dtype == np.float32
    same = [shifts.noisy(x, 1, 10, 0.5, 3, part) for part in (0, 0, 1)]
    assert np.array_equal(same[0], same[1])
    others = [shifts.noisy(x, *who) for who in ((2, 10, 0.5, 3), (1, 10, 0.5, 4))]
    for other in (same[2], *others):  # the test inputs', another client's, another seed's
        assert abs(np.corrcoef((same[0] - x).ravel(), (other - x).ravel())[0, 1]) < 0.05
    with pytest.raises(ValueError, match="inputs of floats, not of uint8"):
        shifts.noisy(x.astype(np.uint8), 1, 10, 0.5, 3)


# long tail


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
    labels = np.arange(600) % 3
    draws = {
        key: tuple(shifts.long_tail(labels, *key, share=0.5, ratio=10.0))
        for key in [(c, t, s) for c in (0, 1) for t in (1, 2) for s in (0, 1)]
    }
    assert len(set(draws.values())) == len(draws)
    again = shifts.long_tail(labels, 1, 2, 0, share=0.5, ratio=10.0)
    assert tuple(again) == draws[1, 2, 0]
    asked_before = shifts.long_tail(labels, 1, 0, 0, share=0.5, ratio=10.0)
    assert tuple(asked_before) == draws[1, 1, 0]
    few = shifts.long_tail(np.array([4, 4, 9]), 0, 1, 0, share=1.0, ratio=1e6)
    assert set(np.array([4, 4, 9])[few]) == {4, 9}  # at least one of each


def test_what_a_long_tail_holds_out_is_never_trained_on() -> None:
    job = job_of(partition="long-tail-rounds", sample_share=0.5, held_out_share=0.25, long_tail=4.0)
    shared = client_data_of(job)
    out, used = set[int](), set[int]()
    for pid in range(3):
        for server_round in range(1, 6):
            held, trained = shared.split(shared.rows(pid, server_round))
            assert 0.1 < len(held) / (len(held) + len(trained)) < 0.4
            out |= set(held.tolist())
            used |= set(trained.tolist())
    assert len(out) > 150
    assert not out & used
    with pytest.raises(
        ValueError, match="held-out-clients does not go with partition=long-tail-rounds"
    ):
        runs_of(partition="long-tail-rounds", held_out_clients=2)


# label swaps


def test_labels_swap_with_the_given_probability_and_stay() -> None:
    swaps = 0
    for seed in range(60):
        maps = [shifts.swapped(6, t, seed, 0.25) for t in range(21)]
        assert maps[0].tolist() == list(range(6))
        for before, after in pairwise(maps):
            assert sorted(after) == list(range(6))
            moved = np.flatnonzero(before != after)
            assert len(moved) in (0, 2)
            swaps += len(moved) == 2
    assert abs(swaps / 1200 - 0.25) < 4.5 * np.sqrt(0.25 * 0.75 / 1200)
    assert shifts.swapped(6, 50, 1, 0.0).tolist() == list(range(6))
    pairs = {tuple(np.flatnonzero(shifts.swapped(4, 1, s, 1.0) != np.arange(4))) for s in range(60)}
    assert len(pairs) == 6
    assert shifts.swapped(1, 9, 0, 1.0).tolist() == [0]


# in a job


def test_a_clients_data_follow_the_round_alone() -> None:
    job = job_of(partition="label-swaps-rounds", swap_probability=1.0, test_on_clients=True)
    plain = job_of(partition="iid", test_on_clients=True)
    for server_round in (0, 1, 4):
        now = shifts.swapped(10, server_round, job.seed, 1.0)
        for part, want in zip(
            examples_of(job, 2, server_round), examples_of(plain, 2, 0), strict=True
        ):
            assert part is not None
            assert want is not None
            assert np.array_equal(part.tensors[0], want.tensors[0])
            assert np.array_equal(part.tensors[1], now[want.tensors[1]])
    assert client_data_of(job).by_round
    assert not client_data_of(plain).by_round


def test_clients_test_on_their_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = data.load("digits")
    job = job_of(partition="dirichlet", dirichlet_alpha=0.5, test_split="matched")
    mine = [client_data_of(job).test_rows(pid) for pid in range(10)]
    assert sorted(np.concatenate(mine)) == list(range(len(digits.test_y)))
    groups, test_groups = np.arange(1437) % 10, np.arange(360) % 10
    made = data.Data(
        *(digits.train_x, digits.train_y, digits.test_x, digits.test_y), groups, test_groups
    )
    monkeypatch.setattr(client_data, "data_of", lambda _: made)
    job = job_of(partition="natural", test_on_clients=True)
    train, test = examples_of(job, 4, 0)
    assert test is not None
    assert np.array_equal(train.tensors[1], digits.train_y[groups == 4])
    assert sorted(test.tensors[1]) == sorted(digits.test_y[test_groups == 4])


def test_a_pachinko_partition_needs_coarse_labels() -> None:
    job, digits = job_of(partition="pachinko"), data.load("digits")
    with pytest.raises(ValueError, match="dataset 'digits' does not say the coarse label"):
        assert client_data_of(job).parts
    parts = ClientData(job, replace(digits, coarse=digits.train_y // 2), 10).parts
    assert sorted(np.concatenate(parts)) == list(range(len(digits.train_y)))
    kinds = [len(set(digits.train_y[p] // 2)) for p in parts]
    assert min(kinds) < 4  # Dir(0.1) over five


def test_the_server_tests_with_the_rounds_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that never learns has the accuracy of the labels that the test data have in each round."""
    from flwr_regs import simulate

    settings: dict[str, Any] = {
        "methods": "FedAvg",
        "rounds": 4,
        "num_clients": 2,
        "local_steps": 1,
    }
    settings |= {"lr": 1e-30, "seeds": [5], "partition": "label-swaps-rounds"}
    (run,) = simulate(**settings, swap_probability=1.0).runs
    digits = data.load("digits")
    from flwr_regs.experiments.models import models

    model = models.build("digits", "auto", 5).eval()
    import torch

    with torch.no_grad():
        said = model(torch.from_numpy(digits.test_x)).argmax(1).numpy()
    for point in run.test:
        now = shifts.swapped(10, point["round"], 5, 1.0)
        assert point["accuracy"] == pytest.approx((said == now[digits.test_y]).mean())
    assert len({point["accuracy"] for point in run.test}) > 2
