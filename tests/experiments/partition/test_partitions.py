"""Partitions: the law of each, over sampled seeds, numbers of clients and label distributions."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from flwr_regs.experiments.partition.partitions import (
    BY_GROUP,
    PARTITIONS,
    partition,
    partition_hash,
)

Array = np.ndarray[Any, Any]
LABELS = np.random.default_rng(0).integers(0, 10, 1000)


def labels_of(sizes: Any, seed: int = 0) -> Array:
    """Shuffled labels with so many examples of each; names that are no range."""
    return np.random.default_rng(seed).permutation(np.repeat(3 * np.arange(len(sizes)) + 5, sizes))


def held(labels: Array, parts: list[Array]) -> Array:
    """The examples of each label (column) that each client (row) holds."""
    return np.array([[(labels[p] == c).sum() for c in np.unique(labels)] for p in parts])


def sampled(count: int) -> Any:
    """(labels, clients, shards or classes for each, seed), most of them possible."""
    rng = np.random.default_rng(5)
    for seed in range(count):
        sizes = rng.integers(1, 40, rng.integers(1, 9)) ** rng.integers(1, 3)
        yield labels_of(sizes, seed), int(rng.integers(1, 15)), int(rng.integers(1, 5)), seed


@pytest.mark.parametrize("kind", PARTITIONS)
def test_every_example_goes_to_one_client_and_the_seed_decides(kind: str) -> None:
    """But for groups that no client has, and for clients that draw from all examples."""
    settings: dict[str, Any] = {"dirichlet_alpha": 0.5, "similarity": 30.0, "quantity_alpha": 5.0}
    seen = Counter[str]()
    for labels, n, s, seed in sampled(30):
        numbers = np.arange(len(labels))
        settings |= {"shards_per_client": s, "classes_per_client": s, "sample_share": 0.5}
        settings |= {"groups": numbers % 14, "fine_labels": numbers % 3}
        try:
            parts, again, other = (
                partition(labels, kind, n, k, **settings) for k in (seed, seed, 99)
            )
        except ValueError:
            continue
        assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
        seen["moved"] += not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))
        seen["split"] += 1
        assert len(parts) == n
        assert min(map(len, parts)) > 0
        assert all(p.dtype == np.int64 and len(set(p.tolist())) == len(p) for p in parts)
        if kind != "long-tail-rounds":
            held = sorted(np.concatenate(parts))
            whole = kind not in (*BY_GROUP, "label-swaps-rounds")
            assert held == list(range(len(labels))) if whole else len(set(held)) == len(held)
    assert seen["split"] > 8
    assert seen["moved"] > 4


def test_a_client_gets_at_most_its_number_of_labels_wherever_that_is_possible() -> None:
    seen = Counter[bool]()
    for labels, n, s, seed in sampled(80):
        if n <= len(labels):
            parts = partition(labels, "shards", n, seed, shards_per_client=s)
            possible = len(np.unique(labels)) <= n * s
            seen[possible] += 1
            assert ((held(labels, parts) > 0).sum(1) <= s).all() == possible
    assert min(seen.values()) > 5
    few = labels_of([3, 1, 4])  # more shards than examples
    assert ((held(few, partition(few, "shards", 5, 0, shards_per_client=3)) > 0).sum(1) <= 3).all()


def least_squares(sizes: list[int], shards: int) -> int:
    """The least sum of squared sizes, over every way to cut classes into so many non-empty shards."""

    def squares(size: int, cuts: int) -> int:
        return sum(len(part) ** 2 for part in np.array_split(np.zeros(size), cuts))

    every = itertools.product(*(range(1, size + 1) for size in sizes))
    return min(sum(map(squares, sizes, cuts)) for cuts in every if sum(cuts) == shards)


def test_shards_are_as_equal_in_size_as_shards_of_one_label_can_be() -> None:
    """With one shard for each client, a client's size is its shard's."""
    rng = np.random.default_rng(1)
    for seed in range(20):
        sizes = rng.integers(1, 13, 3).tolist()
        n = int(rng.integers(3, min(sum(sizes), 12) + 1))
        parts = partition(labels_of(sizes), "shards", n, seed, shards_per_client=1)
        assert sum(len(p) ** 2 for p in parts) == least_squares(sizes, n)


def test_mcmahans_shards_are_equal_in_size_and_dealt_at_random() -> None:
    labels = labels_of([24, 35, 61])
    for n, s in itertools.product(range(1, 7), range(1, 5)):
        cut = np.array_split(np.argsort(labels, kind="stable"), n * s)
        deal = np.random.default_rng(9).permutation(n * s).reshape(n, s)
        got = partition(labels, "shards-mcmahan", n, 9, shards_per_client=s)
        for part, hand in zip(got, deal, strict=True):
            assert np.array_equal(part, np.concatenate([cut[j] for j in hand]))


def exists(sizes: list[int], n: int, m: int) -> bool:
    """Whether n clients can hold exactly m classes each, and together all examples; by trying all."""
    hands = [*itertools.combinations(range(len(sizes)), m)]
    served = (Counter(itertools.chain(*dealt)) for dealt in itertools.product(hands, repeat=n))
    return any(all(1 <= of[c] <= size for c, size in enumerate(sizes)) for of in served)


def test_a_client_gets_exactly_its_number_of_classes_wherever_that_is_possible() -> None:
    rng = np.random.default_rng(2)
    outcomes = Counter[bool]()
    for seed in range(50):
        sizes = rng.integers(1, 5, rng.integers(1, 5)).tolist()
        n, m = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        labels, possible = labels_of(sizes), exists(sizes, n, m)
        outcomes[possible] += 1
        if possible:
            parts = partition(labels, "classes", n, seed, classes_per_client=m)
            assert ((held(labels, parts) > 0).sum(1) == m).all()
        else:
            with pytest.raises(ValueError, match="'classes' of"):
                partition(labels, "classes", n, seed, classes_per_client=m)
    assert min(outcomes.values()) > 10


def one_by_one(sizes: list[int], n: int, alpha: float, rng: np.random.Generator) -> Array:
    """Hsu's split as he tells it: one example after the other, and without the classes that are gone."""
    left, total, got = np.array(sizes), sum(sizes), []
    for _ in range(n):
        gammas = np.array([rng.gamma(alpha * size / total) for size in sizes])
        taken = np.zeros_like(left)
        for _ in range(total // n):
            weights = gammas * (taken < left)
            taken[rng.choice(len(sizes), p=weights / weights.sum())] += 1
        left = left - taken
        got.append(taken)
    return np.array(got)


def test_a_class_that_runs_out_leaves_its_share_to_the_others() -> None:
    """Mean and spread of each client's counts against the plain loop; most classes run out."""
    sizes, alpha, draws = [3, 6, 9], 4.0, 1000
    labels, rng = labels_of(sizes), np.random.default_rng(7)
    want = np.array([one_by_one(sizes, 3, alpha, rng) for _ in range(draws)])
    parts = [partition(labels, "dirichlet-hsu", 3, s, dirichlet_alpha=alpha) for s in range(draws)]
    got = np.array([held(labels, of_seed) for of_seed in parts])
    assert (got.sum(2) == 6).all()
    error = np.sqrt((want.var(0) + got.var(0)) / draws)
    assert (abs(want.mean(0) - got.mean(0)) < 4.5 * error).all()
    np.testing.assert_allclose(got.var(0), want.var(0), rtol=0.2)


def test_each_client_of_a_class_wise_split_gets_ten_examples() -> None:
    """It is the first draw that gives them, of NIID-Bench's loop; `dirichlet` is its other name."""
    tries = 0
    for seed in range(8):
        rng, fewest = np.random.default_rng(seed), 0
        while fewest < 10:
            tries += 1
            want: list[list[int]] = [[] for _ in range(16)]
            for c in range(10):
                rows = rng.permutation(np.flatnonzero(c == LABELS))
                cuts = np.cumsum(rng.dirichlet([0.2] * 16)) * len(rows)
                for client, part in zip(want, np.split(rows, cuts[:-1].astype(int)), strict=True):
                    client += part.tolist()
            fewest = min(map(len, want))
        got = partition(LABELS, "dirichlet", 16, seed, dirichlet_alpha=0.2)
        assert [p.tolist() for p in got] == want
    assert tries > 10


HASHES = {
    "shards": "8b3433dc7698998a",
    "shards-mcmahan": "490e1dc0212da93d",
    "classes": "baae5d992c3aa95c",
    "dirichlet-hsu": "7bcec90a4bdd3f23",
    "dirichlet-niid-bench": "89fc2208bfb3e68e",
    "dirichlet": "89fc2208bfb3e68e",
    "similarity": "71654cbf26521357",
    "iid": "9aab667de9edeb1c",
    "pachinko": "1dbca2019a54e463",
    "quantity": "4b3e5095716c844d",
    "noise": "9aab667de9edeb1c",
    "domains": "2a5d94003354809c",
    "natural": "2e80ca9f12ac7d15",
    "interpolated": "950e3a92bfdb4b50",
    "long-tail-rounds": "0fe4db5173f5d7c4",
    "label-swaps-rounds": "2a5d94003354809c",
}


@pytest.mark.parametrize("kind", PARTITIONS)
def test_a_partition_is_the_same_in_each_version(kind: str) -> None:
    """Results have these hashes, and a card's settings must lead to the same clients in years."""
    labels, rest = np.arange(700) ** 2 % 11 % 7, np.arange(700) % 21
    settings: dict[str, Any] = {"dirichlet_alpha": 0.7, "similarity": 30.0, "sample_share": 0.4}
    settings |= {"groups": rest, "fine_labels": 3 * labels + rest // 7, "shards_per_client": 3}
    parts = partition(labels, kind, 9, 5, classes_per_client=3, **settings)
    assert partition_hash(parts) == HASHES[kind]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("shard", {}, "partition must be one of shards, .*not 'shard'"),
        ("iid", {"n": 2000}, "1000 examples over 2000 clients: each client needs an example"),
        ("classes", {}, "2 of 10 classes would be left out: use more clients"),
        ("classes", {"classes_per_client": 11}, "no client can hold 11 classes of 10"),
        ("classes", {"n": 150, "classes_per_client": 10}, "too small to serve 150 clients"),
        ("dirichlet", {"n": 12, "dirichlet_alpha": 1e-6}, "no draw of 1000 gave each client 10"),
        ("dirichlet", {"n": 150}, "over 150 clients: each client needs 10 examples"),
    ],
)
def test_what_is_impossible_is_said(kind: str, settings: dict[str, Any], message: str) -> None:
    given = {"n": 4, **settings}
    with pytest.raises(ValueError, match=message):
        partition(LABELS, kind, given.pop("n"), 1, **given)
