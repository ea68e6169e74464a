"""Partitions: the law of each, over sampled seeds, numbers of clients and label distributions."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_regs.experiments import cli
from flwr_regs.experiments.partition.partitions import (
    BY_GROUP,
    PARTITIONS,
    partition,
    partition_hash,
)
from flwr_regs.experiments.settings.settings import DEFAULTS
from tests.conftest import ROOT

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
    settings |= {"groups": np.arange(1000) % 23, "fine_labels": 5 * LABELS + np.arange(1000) % 5}
    parts = partition(LABELS, kind, 20, 3, **settings)
    again, other = (partition(LABELS, kind, 20, s, **settings) for s in (3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))
    split = 0
    for labels, n, s, seed in sampled(60):
        settings |= {"shards_per_client": s, "classes_per_client": s, "sample_share": 0.5}
        settings |= {
            "groups": np.arange(len(labels)) % 14,
            "fine_labels": np.arange(len(labels)) % 3,
        }
        try:
            parts = partition(labels, kind, n, seed, **settings)
        except ValueError:
            continue
        split += 1
        assert len(parts) == n
        assert min(map(len, parts)) > 0
        assert all(p.dtype == np.int64 and len(set(p.tolist())) == len(p) for p in parts)
        if kind != "long-tail-rounds":
            held = sorted(np.concatenate(parts))
            whole = kind not in (*BY_GROUP, "label-swaps-rounds")
            assert held == list(range(len(labels))) if whole else len(set(held)) == len(held)
    assert split > 20


# shards


def test_a_client_gets_at_most_its_number_of_labels_wherever_that_is_possible() -> None:
    seen = {"possible": 0, "more labels than shards": 0, "more clients than examples": 0}
    for labels, n, s, seed in sampled(150):
        if n > len(labels):
            seen["more clients than examples"] += 1
            with pytest.raises(ValueError, match="each client needs an example"):
                partition(labels, "shards", n, seed, shards_per_client=s)
            continue
        parts = partition(labels, "shards", n, seed, shards_per_client=s)
        possible = len(np.unique(labels)) <= n * s
        seen["possible" if possible else "more labels than shards"] += 1
        assert ((held(labels, parts) > 0).sum(1) <= s).all() == possible
    assert seen["possible"] > 50
    assert seen["more labels than shards"] > 3
    few = labels_of([3, 1, 4])  # more shards than examples
    assert ((held(few, partition(few, "shards", 5, 0, shards_per_client=3)) > 0).sum(1) <= 3).all()


def least_squares(sizes: list[int], shards: int) -> int:
    """The least sum of squared sizes, over every way to cut classes into so many non-empty shards."""
    best = 10**9
    for cuts in itertools.product(*(range(1, c + 1) for c in sizes)):
        if sum(cuts) == shards:
            each = [
                c // k + (i < c % k) for c, k in zip(sizes, cuts, strict=True) for i in range(k)
            ]
            best = min(best, sum(x * x for x in each))
    return best


def test_shards_are_as_equal_in_size_as_shards_of_one_label_can_be() -> None:
    """With one shard for each client, a client's size is its shard's."""
    rng = np.random.default_rng(1)
    for seed in range(40):
        sizes = rng.integers(1, 13, 3).tolist()
        n = int(rng.integers(3, min(sum(sizes), 12) + 1))
        parts = partition(labels_of(sizes), "shards", n, seed, shards_per_client=1)
        assert sum(len(p) ** 2 for p in parts) == least_squares(sizes, n)


def test_fewer_shards_than_labels_are_mcmahans_too() -> None:
    labels = labels_of([7, 3, 5, 6])
    order = np.argsort(labels, kind="stable")
    cut = [set(order[:11]), set(order[11:])]
    for kind in ("shards", "shards-mcmahan"):
        parts = partition(labels, kind, 2, 4, shards_per_client=1)
        assert sorted(map(sorted, parts)) == sorted(map(sorted, cut))


def test_mcmahans_shards_are_equal_in_size_and_dealt_at_random() -> None:
    labels = labels_of([24, 35, 61])
    for n, s in itertools.product(range(1, 7), range(1, 5)):
        cut = np.array_split(np.argsort(labels, kind="stable"), n * s)
        deal = np.random.default_rng(9).permutation(n * s).reshape(n, s)
        got = partition(labels, "shards-mcmahan", n, 9, shards_per_client=s)
        for mine, hand in zip(got, deal, strict=True):
            assert np.array_equal(mine, np.concatenate([cut[j] for j in hand]))


@pytest.mark.parametrize("sizes", [[60, 60, 60], [24, 36, 60], [9, 9, 6, 8], [6, 6], [4, 3, 2]])
def test_shards_are_mcmahans_where_none_of_his_holds_two_labels(sizes: list[int]) -> None:
    labels = labels_of(sizes)
    found = 0
    for n, s in itertools.product(range(1, 7), range(1, 5)):
        cut = np.array_split(np.argsort(labels, kind="stable"), n * s)
        if max(len(set(labels[c])) for c in cut) > 1 or min(map(len, cut)) == 0:
            continue
        found += 1
        deal = np.random.default_rng(9).permutation(n * s).reshape(n, s)
        want = [np.concatenate([cut[j] for j in hand]) for hand in deal]
        got = partition(labels, "shards", n, 9, shards_per_client=s)
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert found


# classes


def exists(sizes: list[int], n: int, m: int) -> bool:
    """Whether n clients can hold exactly m classes each, and together all examples; by trying all."""
    hands = itertools.combinations(range(len(sizes)), m)
    for dealt in itertools.product(list(hands), repeat=n):
        served = Counter(c for hand in dealt for c in hand)
        if all(1 <= served[c] <= size for c, size in enumerate(sizes)):
            return True
    return False


def test_a_client_gets_exactly_its_number_of_classes_wherever_that_is_possible() -> None:
    rng = np.random.default_rng(2)
    outcomes = Counter[bool]()
    for seed in range(80):
        sizes = rng.integers(1, 5, rng.integers(1, 5)).tolist()
        n, m = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        labels = labels_of(sizes)
        try:
            parts = partition(labels, "classes", n, seed, classes_per_client=m)
        except ValueError:
            possible = False
        else:
            possible = True
            assert ((held(labels, parts) > 0).sum(1) == m).all()
        assert possible == exists(sizes, n, m)
        outcomes[possible] += 1
    assert min(outcomes.values()) > 20


def test_class_blocks_are_equal_and_every_set_of_classes_occurs() -> None:
    labels = labels_of([40, 40, 40, 80])
    drawn = Counter[tuple[int, ...]]()
    for seed in range(200):
        found = held(labels, partition(labels, "classes", 5, seed, classes_per_client=2))
        assert set(found[found > 0]) == {20}
        drawn.update(tuple(np.flatnonzero(row)) for row in found)
    assert set(drawn) == set(itertools.combinations(range(4), 2))


# Dirichlet, client by client


def test_hsus_clients_are_of_equal_size() -> None:
    for labels, n, _, seed in sampled(60):
        if n <= len(labels):
            sizes = [len(p) for p in partition(labels, "dirichlet-hsu", n, seed)]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_a_hsu_clients_class_counts_are_dirichlet_multinomial(alpha: float) -> None:
    """Of M examples: mean M p, variance M p (1 − p)(M + α)/(1 + α), while no class runs out."""
    labels, m, draws = labels_of([100, 200, 100]), 40, 2000
    prior = np.array([0.25, 0.5, 0.25])
    counts = np.array(
        [
            held(labels, partition(labels, "dirichlet-hsu", 10, s, dirichlet_alpha=alpha)[:1])[0]
            for s in range(draws)
        ]
    )
    variance = m * prior * (1 - prior) * (m + alpha) / (1 + alpha)
    error = np.sqrt(variance / draws)
    assert (abs(counts.mean(0) - m * prior) < 4 * error).all()
    np.testing.assert_allclose(counts.var(0), variance, rtol=0.1)


def one_by_one(sizes: list[int], n: int, alpha: float, rng: np.random.Generator) -> Array:
    """Hsu's split as he tells it: one example after the other, and without the classes that are gone."""
    left, total, got = list(sizes), sum(sizes), []
    for _ in range(n):
        gammas = [rng.gamma(alpha * c / total) for c in sizes]
        mine = [0] * len(sizes)
        for _ in range(total // n):
            weights = [g if has else 0.0 for g, has in zip(gammas, left, strict=True)]
            at, c = rng.random() * sum(weights), 0
            while at >= weights[c] or not left[c]:
                at -= weights[c]
                c += 1
            mine[c] += 1
            left[c] -= 1
        got.append(mine)
    return np.array(got)


def test_a_class_that_runs_out_leaves_its_share_to_the_others() -> None:
    """Mean and spread of each client's counts against the plain loop; most classes run out."""
    sizes, alpha, draws = [3, 6, 9], 4.0, 2000
    labels, rng = labels_of(sizes), np.random.default_rng(7)
    want = np.array([one_by_one(sizes, 3, alpha, rng) for _ in range(draws)])
    got = np.array(
        [
            held(labels, partition(labels, "dirichlet-hsu", 3, s, dirichlet_alpha=alpha))
            for s in range(draws)
        ]
    )
    error = np.sqrt((want.var(0) + got.var(0)) / draws)
    assert (abs(want.mean(0) - got.mean(0)) < 4.5 * error).all()
    np.testing.assert_allclose(got.var(0), want.var(0), rtol=0.15)


@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 1e6])
def test_an_extreme_alpha_is_one_class_at_a_time_or_iid(alpha: float) -> None:
    labels = labels_of([50] * 4)
    found = held(labels, partition(labels, "dirichlet-hsu", 8, 1, dirichlet_alpha=alpha))
    if alpha < 1:  # a client moves to another class only when one is gone
        assert ((found > 0).sum(1) <= 3).all()
        assert np.count_nonzero(found) <= 8 + 3
    else:
        assert (found[:4] > 0).all()  # the last clients get what is left


# Dirichlet, class by class


@pytest.mark.parametrize("alpha", [0.5, 5.0])
def test_class_wise_shares_are_dirichlet(alpha: float) -> None:
    """A client's share of a class: mean 1/n, variance (n − 1)/(n² (nα + 1))."""
    n, draws, labels = 4, 700, labels_of([400, 800, 500, 300])
    shares = np.array(
        [
            held(labels, partition(labels, "dirichlet-niid-bench", n, s, dirichlet_alpha=alpha))
            for s in range(draws)
        ]
    ) / [400, 800, 500, 300]
    variance = (n - 1) / (n**2 * (n * alpha + 1))
    assert abs(shares.mean(0) - 1 / n).max() < 4.5 * np.sqrt(variance / draws)
    np.testing.assert_allclose(shares.var(0).mean(), variance, rtol=0.06)


def test_each_client_of_a_class_wise_split_gets_ten_examples() -> None:
    """It is the first draw that gives them, of NIID-Bench's loop; `dirichlet` is its other name."""
    tries = 0
    for seed in range(20):
        rng, fewest = np.random.default_rng(seed), 0
        while fewest < 10:
            tries += 1
            want: list[list[int]] = [[] for _ in range(16)]
            for c in range(10):
                mine = rng.permutation(np.flatnonzero(c == LABELS))
                at = [0, *(np.cumsum(rng.dirichlet([0.2] * 16)) * len(mine)).astype(int)]
                at[-1] = len(mine)
                for k in range(16):
                    want[k] += mine[at[k] : at[k + 1]].tolist()
            fewest = min(map(len, want))
        for kind in ("dirichlet-niid-bench", "dirichlet"):
            got = partition(LABELS, kind, 16, seed, dirichlet_alpha=0.2)
            assert [p.tolist() for p in got] == want
    assert tries > 30


def test_similarity_and_iid() -> None:
    def classes(kind: str, **settings: float) -> Array:
        return (held(LABELS, partition(LABELS, kind, 20, 3, **settings)) > 0).sum(1)

    assert max(classes("similarity", similarity=0.0)) <= 2
    assert min(classes("similarity", similarity=50.0)) > 4
    assert min(classes("iid")) >= 8
    even = labels_of([100] * 10)
    for percent in (0.0, 30.0, 70.0):
        most = held(even, partition(even, "similarity", 10, 3, similarity=percent)).max(1) / 100
        sorted_share = 1 - percent / 100
        assert abs(most.mean() - (sorted_share + 0.1 * (1 - sorted_share))) < 0.07


def test_a_round_is_drawn_for_each_client_and_a_domains_labels_swap_within_it() -> None:
    first, second = partition(LABELS, "long-tail-rounds", 2, 3, sample_share=0.5)
    assert {*first.tolist()} != {*second.tolist()}
    groups = np.arange(1000) % 4
    parts = partition(LABELS, "label-swaps-rounds", 8, 3, groups=groups)
    assert [{*groups[p].tolist()} for p in parts] == [{k % 4} for k in range(8)]


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


# what is impossible


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("shard", {}, "partition must be one of shards, .*not 'shard'"),
        ("similarity", {"similarity": 150.0}, "from 0 to 100 per cent, not 150"),
        ("dirichlet", {"dirichlet_alpha": 0.0}, "dirichlet_alpha must be above 0, not 0"),
    ],
)
def test_wrong_settings_are_named(kind: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(LABELS, kind, 4, 1, **settings)


IMPOSSIBLE = [
    ("partition=iid num-clients=2000", "1437 examples over 2000 clients: each client needs an ex"),
    ("partition=classes num-clients=4", "2 of 10 classes would be left out: use more clients"),
    ("partition=classes classes-per-client=11", "no client can hold 11 classes of 10"),
    ("partition=classes num-clients=150 classes-per-client=10", "too small to serve 150 clients"),
    (
        "partition=dirichlet dirichlet-alpha=0.000001 num-clients=12",
        "no draw of 1000 gave each client 10",
    ),
    (
        "partition=dirichlet-niid-bench num-clients=150",
        "over 150 clients: each client needs 10 examples",
    ),
    ("partition=dirichlet-hsu num-clients=1000 held-out-clients=438", "over 1438 clients: each"),
]


@pytest.mark.parametrize(("settings", "message"), IMPOSSIBLE)
def test_an_impossible_partition_is_refused_in_one_line_before_anything_starts(
    settings: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def started(*_: Any) -> str:
        raise AssertionError("a simulation was started")

    monkeypatch.setattr("flwr_regs.experiments.run.engine.execute", started)
    monkeypatch.chdir(tmp_path)
    end = [*settings.split(), "methods=FedAvg"]
    for command in (["run"], ["sweep", "lr", "--values=0.1", "--seeds=1"]):
        assert cli.main([*command, *end]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert line.startswith("flwr-regs: partition '")


def test_the_page_has_a_row_for_each_partition() -> None:
    """With each of its settings."""
    page = (ROOT / "docs/partitions.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)`.*?\|(.*?)\|", page, re.M)
    assert sorted([*(name for name, _ in rows[1:]), "dirichlet"]) == sorted(PARTITIONS)
    named = {name for _, row in rows[1:] for name in re.findall(r"`([a-z-]+)`", row)}
    assert named < set(DEFAULTS)
