"""Which examples reach a client: from the settings, the data set and the round alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flwr_regs.experiments.data import datasets
from flwr_regs.experiments.data.augment import AUGMENTATIONS, Augmented
from flwr_regs.experiments.data.datasets import Data
from flwr_regs.experiments.partition import client_data, shifts
from flwr_regs.experiments.partition.client_data import ClientData, client_data_of, data_of
from flwr_regs.experiments.run.clients import ClientFactory
from flwr_regs.experiments.settings import Settings
from tests.experiments.runs import runs_of

DIGITS = datasets.load("digits")
GROUPED = replace(
    DIGITS, groups=np.arange(1437) % 10, test_groups=np.arange(360) % 10, coarse=DIGITS.train_y // 2
)


def clients_of(data: Data = DIGITS, **settings: Any) -> ClientData:
    return ClientData(Settings.of({k.replace("_", "-"): v for k, v in settings.items()}), data, 10)


def factory_of(data: Data | None = None, **settings: Any) -> ClientFactory:
    (run,) = runs_of(methods="FedAvg", **settings)
    of_run = client_data_of(run.settings)
    return ClientFactory(run, of_run if data is None else replace(of_run, data=data))


def arrays(part: Any) -> tuple[np.ndarray, np.ndarray]:
    assert part is not None
    return tuple(tensor.numpy() for tensor in part.tensors)


def test_a_client_tests_on_data_like_its_own() -> None:
    natural = factory_of(GROUPED, partition="natural", test_on_clients=True)
    train, test = map(arrays, natural.examples(4))
    np.testing.assert_array_equal(train[0], DIGITS.train_x[GROUPED.groups == 4])
    assert sorted(test[1]) == sorted(DIGITS.test_y[GROUPED.test_groups == 4])
    shards = clients_of()
    for pid in range(10):
        own = np.isin(DIGITS.test_y, DIGITS.train_y[shards.parts[pid]])
        np.testing.assert_array_equal(shards.test_rows(pid), np.flatnonzero(own))
    matched = clients_of(partition="dirichlet", dirichlet_alpha=0.5, test_split="matched")
    rows = np.concatenate([matched.test_rows(pid) for pid in range(10)])
    assert sorted(rows) == list(range(360))
    assert len(clients_of(test_examples=7).test_rows(3)) == 7


def test_held_out_examples_and_clients_never_come_from_the_test_data() -> None:
    """Each training input of this data set is even, each test input odd."""
    x = np.arange(200, dtype=np.float32)[:, None]
    data = Data(x[::2], np.arange(100) % 2, x[1::2], np.arange(100) % 2)
    share = factory_of(data, partition="iid", held_out_share=0.3, num_clients=5)
    for pid in range(5):
        train, held_out = ({*arrays(part)[0][:, 0].tolist()} for part in share.examples(pid))
        assert not train & held_out
        assert {value % 2 for value in train | held_out} == {0}
        assert (len(train), len(held_out)) == (14, 6)
    from_training, rows = clients_of(data, partition="iid", held_out_clients=2).server_rows()
    assert from_training
    assert len(rows) == 16  # 100 examples over 12 clients
    assert not clients_of(data).server_rows()[0]


def test_what_a_long_tail_holds_out_is_never_trained_on() -> None:
    tail = {"partition": "long-tail-rounds", "sample_share": 0.5, "long_tail": 4.0}
    clients = clients_of(**tail, held_out_share=0.25)
    out, used = set[int](), set[int]()
    for pid in range(3):
        for server_round in range(1, 6):
            held, trained = clients.split(clients.rows(pid, server_round))
            assert 0.1 < len(held) / (len(held) + len(trained)) < 0.4
            out |= set(held.tolist())
            used |= set(trained.tolist())
    assert len(out) > 150
    assert not out & used


def test_held_out_examples_are_not_augmented() -> None:
    pictures = np.random.default_rng(0).random((20, 3, 32, 32), np.float32)
    data = Data(pictures, np.arange(20) % 4, pictures, np.arange(20) % 4, augment="crop-24")
    factory = factory_of(data, partition="iid", num_clients=2, held_out_share=0.4)
    train, held_out = factory.examples(0)
    assert isinstance(train, Augmented)
    assert not isinstance(held_out, Augmented)
    rows, _ = factory.clients.split(factory.clients.parts[0])
    want = AUGMENTATIONS["crop-24"].test(torch.from_numpy(pictures[rows]))
    np.testing.assert_array_equal(arrays(held_out)[0], want.numpy())
    first, again = train[[0, 1]], train[[0, 1]]
    assert first[0].shape[1:] == (3, 24, 24)
    assert not torch.equal(first[0], again[0])  # drawn anew for each batch
    assert torch.equal(first[1], train.tensors[1][:2])  # the labels stay


def test_a_clients_labels_follow_the_round_alone() -> None:
    swapped = factory_of(partition="label-swaps-rounds", swap_probability=1.0, test_on_clients=True)
    plain = factory_of(partition="iid", test_on_clients=True)
    for server_round in (0, 1, 4):
        labels = shifts.swapped(10, server_round, 7, 1.0)
        for part, want in zip(swapped.examples(2, server_round), plain.examples(2), strict=True):
            np.testing.assert_array_equal(arrays(part)[0], arrays(want)[0])
            np.testing.assert_array_equal(arrays(part)[1], labels[arrays(want)[1]])


def test_a_pachinko_partition_needs_coarse_labels() -> None:
    with pytest.raises(ValueError, match="dataset 'digits' does not say the coarse label"):
        assert clients_of(partition="pachinko").parts
    parts = clients_of(GROUPED, partition="pachinko").parts
    assert sorted(np.concatenate(parts)) == list(range(1437))
    assert min(len(set(DIGITS.train_y[rows] // 2)) for rows in parts) < 4  # Dir(0.1) over five


def test_groups_bound_what_examples_leaves_only_where_they_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_data, "load", lambda *_: GROUPED)
    client_data._data.cache_clear()
    shards = data_of(Settings.of({"examples": 300, "num-clients": 4}))
    assert (np.bincount(shards.groups) > 20).all()  # of all ten groups
    settings = Settings.of({"examples": 300, "num-clients": 4, "partition": "natural"})
    with pytest.warns(UserWarning, match="keeps 300 of 1437 .* the first 4 of 10 groups"):
        natural = data_of(settings)
    assert np.bincount(natural.groups).tolist() == [75] * 4
    client_data._data.cache_clear()


def shared_of(**settings: Any) -> ClientData:
    return client_data_of(Settings.of({k.replace("_", "-"): v for k, v in settings.items()}))


def test_runs_that_share_their_data_settings_share_the_clients_data() -> None:
    shared = shared_of(lr=0.1, rounds=3, methods="FedAvg")
    assert shared is shared_of(lr=0.2, rounds=5, methods="FedFOR")
    assert shared is not shared_of(seed=8)
    assert shared.hash == shared_of(swap_probability=0.9).hash != shared_of(seed=8).hash
    assert shared.label_counts.sum() == len(shared.data.train_y)


def test_a_bounded_test_is_drawn_once_for_the_server_and_for_each_client() -> None:
    shared = clients_of(test_examples=12, test_on_clients=True)
    of_training, rows = shared.server_rows()
    assert (of_training, len({*rows.tolist()})) == (False, 12)
    assert rows.tolist() == clients_of(test_examples=12).server_rows()[1].tolist()
    own = clients_of(test_on_clients=True)
    for pid in range(3):
        assert len(shared.test_rows(pid)) == 12
        assert {*shared.test_rows(pid).tolist()} < {*own.test_rows(pid).tolist()}
    few = clients_of(test_examples=5, held_out_clients=2)
    _, rows = few.server_rows()
    assert len(rows) == 5
    assert not {*rows.tolist()} & {*np.concatenate(few.parts).tolist()}


def test_stragglers_are_a_function_of_seed_partition_and_round() -> None:
    given = {"straggler_share": 0.5, "straggler_speed": 0.2, "drop_out": 0.1}
    shared = clients_of(**given)
    done = np.array([[shared.step_budget(t, p, 100) for p in range(40)] for t in range(1, 41)])
    again = clients_of(**given)
    assert done[7, 5] == again.step_budget(8, 5, 100)
    slow = [p for p in range(40) if ((done[:, p] > 0) & (done[:, p] < 100)).any()]
    assert 10 <= len(slow) <= 30
    assert 0.05 < (done == 0).mean() < 0.15
    managed = done[:, slow][done[:, slow] > 0]
    assert managed.min() >= 20
    assert all(len(set(done[:, p]) - {0}) == 1 for p in slow)  # its own speed
    assert len({done[:, p].max() for p in slow}) > 5
    assert 50 < managed.mean() < 70
    quick = [p for p in range(40) if p not in slow]
    assert set(np.unique(done[:, quick])) == {0, 100}
    assert clients_of().step_budget(1, 0, 100) is None
    assert {clients_of(drop_out=0.5).step_budget(1, p, 9) for p in range(9)} == {0, 9}
