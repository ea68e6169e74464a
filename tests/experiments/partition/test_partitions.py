"""Partitions: one law for all, over sampled seeds, clients and labels; then the property of each one.

commands.txt has what is impossible.
"""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner

from flwr_regs.experiments.partition import partitions, splits
from flwr_regs.experiments.partition.partitions import IN_GROUPS, partition_hash
from flwr_regs.experiments.settings import Settings, key

Array = np.ndarray[Any, Any]
LABELS = np.random.default_rng(0).integers(0, 10, 1000)
FEW = np.random.default_rng(0).integers(0, 5, 400)


def partition(labels: Array, kind: str, n: int, seed: int, **given: Any) -> list[Array]:
    of_examples = {name: given.pop(name, None) for name in ("groups", "coarse")}
    settings = {"partition": kind, "seed": seed, **{key(k): value for k, value in given.items()}}
    return partitions.partition(labels, Settings.of(settings), n, **of_examples)


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
"""Partition -> its hash: results have it, and a card's settings must lead to the same clients in years."""


@pytest.mark.parametrize("kind", HASHES)
def test_every_example_goes_to_one_client_and_the_seed_decides(kind: str) -> None:
    """But for groups that no client has, and for clients that draw from all examples."""
    settings: dict[str, Any] = {"dirichlet_alpha": 0.7, "similarity": 30.0, "sample_share": 0.4}
    labels, rest = np.arange(700) ** 2 % 11 % 7, np.arange(700) % 21
    given = {"groups": rest, "coarse": labels, "shards_per_client": 3}
    fine = 3 * labels + rest // 7 if kind == "pachinko" else labels
    parts = partition(fine, kind, 9, 5, classes_per_client=3, **given, **settings)
    assert partition_hash(parts) == HASHES[kind]
    seen = Counter[str]()
    for labels, n, s, seed in sampled(30):
        numbers = np.arange(len(labels))
        settings |= {"shards_per_client": s, "classes_per_client": s, "quantity_alpha": 5.0}
        settings |= {"groups": numbers % 14, "coarse": numbers % 3}
        try:
            parts, *others = (partition(labels, kind, n, k, **settings) for k in (seed, seed, 99))
        except ValueError:
            continue
        again, other = map(partition_hash, others)
        assert partition_hash(parts) == again
        seen["moved"] += again != other
        seen["split"] += 1
        assert len(parts) == n
        assert min(map(len, parts)) > 0
        assert all(p.dtype == np.int64 and len(set(p.tolist())) == len(p) for p in parts)
        if kind != "long-tail-rounds":
            rows = sorted(np.concatenate(parts))
            whole = kind not in IN_GROUPS
            assert rows == list(range(len(labels))) if whole else len(set(rows)) == len(rows)
    assert min(seen["split"] - 4, seen["moved"]) > 4


def test_a_client_gets_at_most_its_number_of_labels_wherever_that_is_possible() -> None:
    seen = Counter[bool]()
    for labels, n, s, seed in sampled(80):
        if n * s <= len(labels):
            parts = partition(labels, "shards", n, seed, shards_per_client=s)
            possible = len(np.unique(labels)) <= n * s
            seen[possible] += 1
            assert ((held(labels, parts) > 0).sum(1) <= s).all() == possible
    assert min(seen.values()) > 5


def squares(size: int, cuts: int) -> int:
    return sum(len(part) ** 2 for part in np.array_split(np.zeros(size), cuts))


def test_shards_are_as_equal_in_size_as_shards_of_one_label_can_be() -> None:
    """One shard a client: the least sum of squared sizes over every way to cut the classes."""
    rng = np.random.default_rng(1)
    for seed in range(20):
        sizes = rng.integers(1, 13, 3).tolist()
        n = int(rng.integers(3, min(sum(sizes), 12) + 1))
        parts = partition(labels_of(sizes), "shards", n, seed, shards_per_client=1)
        every = itertools.product(*(range(1, size + 1) for size in sizes))
        least = min(sum(map(squares, sizes, cuts)) for cuts in every if sum(cuts) == n)
        assert sum(len(p) ** 2 for p in parts) == least


def test_mcmahans_shards_are_equal_in_size_and_dealt_at_random() -> None:
    labels = labels_of([24, 35, 61])
    for n, s in ((1, 4), (5, 1), (6, 3)):
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
        labels, possible = labels_of(sizes), True
        try:
            parts = partition(labels, "classes", n, seed, classes_per_client=m)
            assert ((held(labels, parts) > 0).sum(1) == m).all()
        except ValueError:
            possible = False
        assert possible == exists(sizes, n, m)
        outcomes[possible] += 1
    assert min(outcomes.values()) > 10


def leaf_by_leaf(fine: list[list[int]], n: int, alpha: Any, beta: float, rng: Any) -> Array:
    """Reddi et al.'s loop, an example at a time: what is gone leaves the tree, the rest is renormalised."""
    left, counts = [np.array(sizes) for sizes in fine], []
    for _ in range(n):
        root = rng.gamma(alpha, size=len(fine))
        below = [rng.gamma(beta, size=len(sizes)) for sizes in fine]
        taken = [np.zeros_like(sizes) for sizes in left]
        for _ in range(sum(map(sum, fine)) // n):
            p = root * [leaves.sum() > 0 for leaves in left]
            c = rng.choice(len(p), p=p / p.sum())
            q = below[c] * (left[c] > 0)
            f = rng.choice(len(q), p=q / q.sum())
            taken[c][f] += 1
            left[c][f] -= 1
        counts.append(np.concatenate(taken))
    return np.array(counts)


@pytest.mark.parametrize(
    ("kind", "sizes", "alpha", "settings"),
    [
        ("dirichlet-hsu", [[3], [6], [9]], 4 * np.array([3, 6, 9]) / 18, {"dirichlet_alpha": 4.0}),
        ("pachinko", [[3, 5], [8], [2, 2, 4]], 0.5, {"pachinko_alpha": 0.5, "pachinko_beta": 9.0}),
    ],
)
def test_a_label_that_runs_out_leaves_its_share_to_the_others(
    kind: str, sizes: list[list[int]], alpha: Any, settings: dict[str, float]
) -> None:
    """Mean and spread of each client's counts against the plain loop; Hsu's tree has one leaf a class."""
    rng, draws, flat = np.random.default_rng(1), 600, [*itertools.chain(*sizes)]
    want = np.array([leaf_by_leaf(sizes, 3, alpha, 9.0, rng) for _ in range(draws)])
    fine = labels_of(flat)
    coarse = np.repeat(np.arange(len(sizes)), [len(s) for s in sizes])[(fine - 5) // 3]
    given = {**settings, "coarse": coarse}
    got = np.array([held(fine, partition(fine, kind, 3, s, **given)) for s in range(draws)])
    assert (got.sum(2) == sum(flat) // 3).all()
    error = np.sqrt((want.var(0) + got.var(0)) / draws)
    assert (abs(want.mean(0) - got.mean(0)) < 4.5 * error).all()
    np.testing.assert_allclose(got.var(0), want.var(0), rtol=0.4)


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


def test_quantities_are_dirichlet_and_the_rest_is_iid() -> None:
    """A client's share: mean 1/n, variance (n − 1)/(n² (nα + 1)); 10 examples bind too seldom to show."""
    n, alpha, draws = 4, 5.0, 500
    labels = labels_of([1000] * 4)
    parts = [partition(labels, "quantity", n, s, quantity_alpha=alpha) for s in range(draws)]
    shares = np.array([[len(p) for p in draw] for draw in parts]) / 4000
    variance = (n - 1) / (n**2 * (n * alpha + 1))
    assert abs(shares.mean(0) - 1 / n).max() < 4.5 * np.sqrt(variance / draws)
    np.testing.assert_allclose(shares.var(0).mean(), variance, rtol=0.1)
    kinds = held(labels, parts[0])
    assert abs(kinds / kinds.sum(1, keepdims=True) - 0.25).max() < 0.1
    small = [partition(labels[:400], "quantity", 8, s, quantity_alpha=0.5) for s in range(15)]
    assert 10 <= min(map(len, itertools.chain(*small))) < 20  # as far as they may go


def split(groups: Array, kind: str, n: int, seed: int = 0, **settings: Any) -> list[Array]:
    return partition(np.zeros(len(groups), np.int64), kind, n, seed, groups=groups, **settings)


def test_groups_are_whole_shared_equally_or_interpolated_with_iid() -> None:
    groups = (labels_of([40, 10, 65]) - 5) // 3
    whole = [set(np.flatnonzero(groups == g)) for g in range(3)]
    assert [set(p) for p in split(groups, "natural", 3)] == whole  # in order
    pairs = {tuple(whole.index(set(p)) for p in split(groups, "natural", 2, s)) for s in range(60)}
    assert pairs == {*itertools.combinations(range(3), 2)}
    shared = split(groups, "domains", 7)
    assert [set(groups[rows]) for rows in shared] == [{client % 3} for client in range(7)]
    assert sorted(map(len, shared)) == [5, 5, 13, 13, 14, 32, 33]
    mean = np.zeros(3)
    for seed in range(400):
        mixed = split(groups, "interpolated", 3, seed, interpolation=0.4)
        assert [len(p) for p in mixed] == [40, 10, 65]
        mean += [(groups[p] == k).mean() / 400 for k, p in enumerate(mixed)]
    np.testing.assert_allclose(mean, 0.6 + 0.4 * np.array([40, 10, 65]) / 115, atol=0.02)
    unmixed = split(groups, "interpolated", 3, interpolation=0.0)
    assert [set(p) for p in unmixed] == whole


def test_test_data_is_distributed_as_the_training_data() -> None:
    rng = np.random.default_rng(3)
    train, test = rng.integers(0, 5, 4000), rng.integers(0, 5, 2000)
    parts = partition(train, "dirichlet", 6, 1, dirichlet_alpha=0.5)
    tests = splits.test_split(train, parts, test, 1, "")
    assert sorted(np.concatenate(tests)) == list(range(2000))
    scaled = held(train, parts) * np.bincount(test) / np.bincount(train)
    assert abs(held(test, tests) - scaled).max() <= 1
    assert not np.array_equal(tests[0], splits.test_split(train, parts, test, 2, "")[0])
    # what nobody trains on is left out
    train, test = np.array([0, 0, 1, 1, 2]), np.array([2, 0, 1, 1, 0, 2])
    tests = splits.test_split(train, [np.array([0, 1]), np.array([2, 3])], test, 0, "")
    assert [sorted(rows) for rows in tests] == [[1, 4], [2, 3]]
    # the smallest of three takes one from the largest
    tests = splits.test_split(np.zeros(30), np.split(np.arange(30), [1, 10]), np.zeros(4), 0, "")
    assert [len(rows) for rows in tests] == [1, 1, 2]
    assert sorted(np.concatenate(tests)) == [0, 1, 2, 3]


def test_the_hash_is_the_same_on_every_platform() -> None:
    parts = [np.array([0, 2]), np.array([1])]
    assert partition_hash([p.astype(">i4") for p in parts]) == "363a551de55f8c05"


def test_the_parts_are_those_of_flowers_partitioner_and_of_the_seed() -> None:
    parts = partition(FEW, "fds:DirichletPartitioner(alpha=0.5)", 4, seed=3)
    theirs = DirichletPartitioner(num_partitions=4, partition_by="label", alpha=0.5, seed=3)
    theirs.dataset = Dataset.from_dict({"row": np.arange(400), "label": FEW})
    assert [p.tolist() for p in parts] == [theirs.load_partition(k)["row"][:] for k in range(4)]


def test_a_natural_partitioner_goes_by_the_groups() -> None:
    groups = FEW[::-1].copy()
    kind = "fds:NaturalIdPartitioner(partition_by='group')"
    parts = partition(FEW, kind, 5, seed=0, groups=groups)
    assert all(len({*groups[rows]}) == 1 for rows in parts)
