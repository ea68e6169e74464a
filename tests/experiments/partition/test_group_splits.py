"""Partitions by groups, sizes and two levels of labels; test data as the training data; the hash."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from flwr_regs.experiments.partition.group_splits import (
    test_split as split_test,  # pytest collects `test_…`
)
from flwr_regs.experiments.partition.partitions import partition, partition_hash

Array = np.ndarray[Any, Any]


def grouped(sizes: Any, seed: int = 0) -> Array:
    """Shuffled groups with so many examples of each."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


def split(groups: Array, kind: str, n: int, seed: int = 0, **settings: Any) -> list[Array]:
    return partition(np.zeros(len(groups), np.int64), kind, n, seed, groups=groups, **settings)


def test_natural_gives_each_client_one_whole_group() -> None:
    groups = grouped([5, 1, 9, 3])
    whole = [set(np.flatnonzero(groups == g)) for g in range(4)]
    assert [set(p) for p in split(groups, "natural", 4)] == whole  # in order
    pairs = {tuple(whole.index(set(p)) for p in split(groups, "natural", 2, s)) for s in range(120)}
    assert pairs == {*itertools.combinations(range(4), 2)}
    with pytest.raises(ValueError, match=r"18 examples over 5 clients: the data has 4 groups"):
        split(groups, "natural", 5)


def test_the_clients_of_a_domain_share_it_equally() -> None:
    groups = grouped([40, 17, 60])
    for n in (3, 7, 8):
        parts = split(groups, "domains", n)
        assert sorted(np.concatenate(parts)) == list(range(117))
        for client, rows in enumerate(parts):
            assert set(groups[rows]) == {client % 3}
        for g in range(3):
            sizes = [len(p) for p in parts[g::3]]
            assert max(sizes) - min(sizes) <= 1
    assert [set(groups[p]) for p in split(groups, "domains", 2)] == [{0}, {1}]


def test_interpolation_goes_from_natural_to_iid_and_keeps_the_sizes() -> None:
    sizes = np.array([100, 50, 250])
    groups = grouped(sizes)
    natural = [set(p) for p in split(groups, "natural", 3)]
    assert [set(p) for p in split(groups, "interpolated", 3, interpolation=0.0)] == natural
    own = {share: np.zeros(3) for share in (0.4, 1.0)}
    for share, mean in own.items():
        for seed in range(100):
            parts = split(groups, "interpolated", 3, seed, interpolation=share)
            assert [len(p) for p in parts] == sizes.tolist()
            assert sorted(np.concatenate(parts)) == list(range(400))
            mean += [(groups[p] == k).mean() / 100 for k, p in enumerate(parts)]
    for share, mean in own.items():
        np.testing.assert_allclose(mean, 1 - share + share * sizes / 400, atol=0.015)


def test_groups_are_needed_and_one_for_each_example() -> None:
    labels = np.zeros(6, np.int64)
    with pytest.raises(ValueError, match=r"not say the group \(writer, speaker, user or domain\)"):
        partition(labels, "natural", 2, 0)
    with pytest.raises(ValueError, match=r"groups has the shape \(5,\), expected \(6,\)"):
        partition(labels, "domains", 2, 0, groups=labels[:5])
    with pytest.raises(ValueError, match="fine label of each example"):
        partition(labels, "pachinko", 2, 0)


def test_quantities_are_dirichlet_and_the_rest_is_iid() -> None:
    """A client's share: mean 1/n, variance (n − 1)/(n² (nα + 1)); 10 examples bind too seldom to show."""
    n, alpha, draws = 4, 5.0, 500
    labels = grouped([1000] * 4)
    parts = [partition(labels, "quantity", n, s, quantity_alpha=alpha) for s in range(draws)]
    shares = np.array([[len(p) for p in draw] for draw in parts]) / 4000
    variance = (n - 1) / (n**2 * (n * alpha + 1))
    assert abs(shares.mean(0) - 1 / n).max() < 4.5 * np.sqrt(variance / draws)
    np.testing.assert_allclose(shares.var(0).mean(), variance, rtol=0.1)
    kinds = np.array([[(labels[p] == c).mean() for c in range(4)] for p in parts[0]])
    assert abs(kinds - 0.25).max() < 0.1


def test_each_client_of_a_quantity_skew_gets_ten_examples() -> None:
    labels = np.zeros(400, np.int64)
    draws = [partition(labels, "quantity", 8, s, quantity_alpha=0.5) for s in range(15)]
    assert 10 <= min(len(part) for parts in draws for part in parts) < 20  # as far as they may go
    with pytest.raises(ValueError, match="no draw of 1000 gave each client 10 examples"):
        partition(labels, "quantity", 8, 0, quantity_alpha=1e-3)


def leaf_by_leaf(fine: list[list[int]], n: int, alpha: float, beta: float, rng: Any) -> Array:
    """Reddi et al.'s loop, an example at a time: what is gone leaves the tree, the rest is renormalised."""
    left, got = [np.array(sizes) for sizes in fine], []
    for _ in range(n):
        root = np.array([rng.gamma(alpha) for _ in fine])
        below = [np.array([rng.gamma(beta) for _ in sizes]) for sizes in fine]
        taken = [np.zeros_like(sizes) for sizes in left]
        for _ in range(sum(map(sum, fine)) // n):
            p = root * [leaves.sum() > 0 for leaves in left]
            c = rng.choice(len(p), p=p / p.sum())
            q = below[c] * (left[c] > 0)
            f = rng.choice(len(q), p=q / q.sum())
            taken[c][f] += 1
            left[c][f] -= 1
        got.append(np.concatenate(taken))
    return np.array(got)


def test_pachinko_is_the_plain_loop_where_labels_run_out() -> None:
    """Mean and spread of each client's count of each fine label."""
    sizes, draws = [[3, 5], [8], [2, 2, 4]], 500
    flat = [size for counts in sizes for size in counts]
    order = np.random.default_rng(0).permutation(sum(flat))
    fine = np.repeat(np.arange(6), flat)[order]
    coarse = np.repeat([0, 0, 1, 2, 2, 2], flat)[order]
    rng = np.random.default_rng(1)
    want = np.array([leaf_by_leaf(sizes, 3, 0.5, 9.0, rng) for _ in range(draws)])
    settings = {"fine_labels": fine, "pachinko_alpha": 0.5, "pachinko_beta": 9.0}
    parts = [partition(coarse, "pachinko", 3, seed, **settings) for seed in range(draws)]
    got = np.array([[np.bincount(fine[p], minlength=6) for p in of_seed] for of_seed in parts])
    assert (got.sum(2) == 8).all()
    error = np.sqrt((want.var(0) + got.var(0)) / draws)
    assert (abs(want.mean(0) - got.mean(0)) < 4.5 * error).all()
    np.testing.assert_allclose(got.var(0), want.var(0), rtol=0.4)


def test_test_data_is_distributed_as_the_training_data() -> None:
    rng = np.random.default_rng(3)
    train, test = rng.integers(0, 5, 4000), rng.integers(0, 5, 2000)
    parts = partition(train, "dirichlet", 6, 1, dirichlet_alpha=0.5)
    tests = split_test(train, parts, test, 1)
    assert sorted(np.concatenate(tests)) == list(range(2000))
    for own, trained in zip(tests, parts, strict=True):
        counts = np.bincount(train[trained], minlength=5)
        scaled = counts * np.bincount(test) / np.bincount(train)
        assert abs(np.bincount(test[own], minlength=5) - scaled).max() <= 1
    assert not np.array_equal(tests[0], split_test(train, parts, test, 2)[0])


def test_test_data_of_a_kind_that_nobody_has_is_left_out() -> None:
    train, test = np.array([0, 0, 1, 1, 2]), np.array([2, 0, 1, 1, 0, 2])
    tests = split_test(train, [np.array([0, 1]), np.array([2, 3])], test, 0)
    assert [sorted(rows) for rows in tests] == [[1, 4], [2, 3]]
    with pytest.raises(ValueError, match="1 of 2 clients would get no test data"):
        split_test(train, [np.array([0, 1]), np.array([4])], test[1:5], 0)


def test_the_hash_tells_partitions_apart_and_no_platform() -> None:
    parts = [np.array([0, 2]), np.array([1])]
    assert partition_hash(parts) == "363a551de55f8c05"
    assert partition_hash([p.astype(">i4") for p in parts]) == partition_hash(parts)
    others = ([parts[0][::-1], parts[1]], parts[::-1], [np.array([0]), np.array([2, 1])])
    assert len({partition_hash(p) for p in (parts, *others)}) == 4
