"""Which examples reach a client: from the settings, the data set and the round alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flwr_regs.experiments.data import datasets
from flwr_regs.experiments.data.augment import AUGMENTATIONS, Augmented
from flwr_regs.experiments.data.datasets import Data
from flwr_regs.experiments.partition import client_data, shifts
from flwr_regs.experiments.partition.client_data import ClientData, client_data_of
from flwr_regs.experiments.run.clients import RunClients
from flwr_regs.experiments.settings import DEFAULTS, Settings
from tests.experiments.runs import runs_of

DIGITS = datasets.load("digits")
GROUPED = replace(
    DIGITS, groups=np.arange(1437) % 10, test_groups=np.arange(360) % 10, coarse=DIGITS.train_y // 2
)


def settings_of(**settings: Any) -> Settings:
    return Settings.of({name.replace("_", "-"): value for name, value in settings.items()})


def clients_of(data: Data = DIGITS, **settings: Any) -> ClientData:
    return ClientData(settings_of(**settings), data)


def made_of(data: Data = DIGITS, **settings: Any) -> RunClients:
    (run,) = runs_of(methods="FedAvg", **settings)
    return RunClients(run, replace(client_data_of(run.settings), data=data))


def arrays(part: Any) -> tuple[np.ndarray, np.ndarray]:
    return tuple(tensor.numpy() for tensor in part.tensors)


def test_a_client_tests_on_data_like_its_own() -> None:
    for kind in ("natural", "label-swaps-rounds"):
        grouped = made_of(GROUPED, partition=kind, test_on_clients=True)
        train, test = map(arrays, grouped.examples(4))
        assert sorted(train[1]) == sorted(DIGITS.train_y[GROUPED.groups == 4])
        assert sorted(test[1]) == sorted(DIGITS.test_y[GROUPED.test_groups == 4])
    shards, bounded = clients_of(), clients_of(test_examples=12)
    for pid in range(10):
        of_its_classes = np.isin(DIGITS.test_y, DIGITS.train_y[shards.parts[pid]])
        np.testing.assert_array_equal(shards.test_rows(pid), np.flatnonzero(of_its_classes))
        assert len(bounded.test_rows(pid)) == 12
        assert {*bounded.test_rows(pid).tolist()} < {*shards.test_rows(pid).tolist()}
    matched = clients_of(partition="dirichlet", dirichlet_alpha=0.5, test_split="matched")
    rows = np.concatenate([matched.test_rows(pid) for pid in range(10)])
    assert sorted(rows) == list(range(360))


def test_held_out_examples_and_clients_never_come_from_the_test_data() -> None:
    """Each training input of this data set is even, each test input odd."""
    x = np.arange(200, dtype=np.float32)[:, None]
    data = Data(x[::2], np.arange(100) % 2, x[1::2], np.arange(100) % 2)
    share = made_of(data, partition="iid", held_out_share=0.3, num_clients=5)
    for pid in range(5):
        train, held_out = ({*arrays(part)[0][:, 0].tolist()} for part in share.examples(pid))
        assert not train & held_out
        assert {value % 2 for value in train | held_out} == {0}
        assert (len(train), len(held_out)) == (14, 6)
    for given, of_training, count in (
        ({"partition": "iid", "held_out_clients": 2}, True, 16),  # 100 examples over 12 clients
        ({"held_out_clients": 2, "test_examples": 5}, True, 5),
        ({"test_examples": 12}, False, 12),
    ):
        clients = clients_of(data, **given)
        from_training, rows = clients.server_rows()
        assert (from_training, len({*rows.tolist()})) == (of_training, count)
        assert rows.tolist() == clients_of(data, **given).server_rows()[1].tolist()
        assert not of_training or not {*rows.tolist()} & {*np.concatenate(clients.parts).tolist()}
    assert clients_of(data).server_rows() == (False, slice(None))
    train, test = np.zeros((9, 80), np.int32), np.zeros((3000, 80), np.int32)
    texts = Data(train, np.arange(9), test, np.arange(3000) % 9)
    for examples, tested in ((10_000, 2000), (2500, 2500), (0, 3000)):
        made = clients_of(texts, num_clients=2, test_examples=examples)
        assert len(np.arange(3000)[made.server_rows()[1]]) == tested
    assert DEFAULTS["test-examples"] == client_data.USUAL  # else nobody would have the 2000


def test_what_a_long_tail_holds_out_is_never_trained_on() -> None:
    tail = {"partition": "long-tail-rounds", "sample_share": 0.5, "long_tail": 4.0}
    clients = clients_of(**tail, held_out_share=0.25)
    out, used = set[int](), set[int]()
    for pid, server_round in np.ndindex(3, 5):
        held, trained = clients.split(clients.rows(pid, server_round + 1))
        assert 0.1 < len(held) / (len(held) + len(trained)) < 0.4
        out |= set(held.tolist())
        used |= set(trained.tolist())
    assert len(out) > 150
    assert not out & used


def test_held_out_examples_are_not_augmented() -> None:
    pictures = np.random.default_rng(0).random((20, 3, 32, 32), np.float32)
    data = Data(pictures, np.arange(20) % 4, pictures, np.arange(20) % 4, augment="crop-24")
    clients = made_of(data, partition="iid", num_clients=2, held_out_share=0.4)
    train, held_out = clients.examples(0)
    assert isinstance(train, Augmented)
    assert not isinstance(held_out, Augmented)
    rows, _ = clients.data.split(clients.data.parts[0])
    want = AUGMENTATIONS["crop-24"].test(torch.from_numpy(pictures[rows]))
    np.testing.assert_array_equal(arrays(held_out)[0], want.numpy())


def test_a_clients_labels_follow_the_round_alone() -> None:
    swapped = made_of(partition="label-swaps-rounds", swap_probability=1.0, test_on_clients=True)
    plain = made_of(partition="iid", test_on_clients=True)
    for server_round in (0, 1, 4):
        labels = shifts.swapped(10, server_round, 7, 1.0)
        for part, want in zip(swapped.examples(2, server_round), plain.examples(2), strict=True):
            np.testing.assert_array_equal(arrays(part)[0], arrays(want)[0])
            np.testing.assert_array_equal(arrays(part)[1], labels[arrays(want)[1]])


def test_a_pachinko_partition_goes_by_the_coarse_labels() -> None:
    parts = clients_of(GROUPED, partition="pachinko").parts
    assert min(len(set(DIGITS.train_y[rows] // 2)) for rows in parts) < 4  # Dir(0.1) over five


LEFT = [
    # settings, and what is left of 1,437 training examples of ten groups and 360 for testing
    ({}, ""),
    ({"examples": 300}, "300 of 1,437 training examples, 60 of 360 test examples"),
    ({"examples_per_client": 20}, "80 of 1,437 training examples"),
    ({"test_examples": 50}, "50 of 360 test examples"),
    ({"held_out_clients": 1, "examples": 300}, "300 of 1,437 training examples"),
    ({"partition": "natural"}, "574 of 1,437 training examples, 4 of 10 groups"),
    (
        {"partition": "natural", "examples": 300},
        "114 of 1,437 training examples, 4 of 10 groups, 60 of 360 test examples",
    ),
    ({"partition": "long-tail-rounds"}, ""),
    ({"examples": 1437}, "287 of 360 test examples"),
    ({"examples": 1800}, "all 1,437 examples to train on (examples=1800 asks for more)"),
]


@pytest.mark.parametrize(("given", "words"), LEFT)
def test_what_is_left_of_the_data_is_said(
    given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_data, "load", lambda *_: GROUPED)
    settings = settings_of(num_clients=4, **given)
    assert client_data.left(settings, client_data_of(settings)) == words


def test_runs_that_share_their_data_settings_share_the_clients_data() -> None:
    shared, other = client_data_of(settings_of(lr=0.1)), client_data_of(settings_of(seed=8))
    assert shared is client_data_of(settings_of(lr=0.2, rounds=5, methods="FedFOR"))
    assert shared is not other
    swapped = client_data_of(settings_of(swap_probability=0.9))
    assert shared.hash == swapped.hash != other.hash
    assert shared.label_counts.sum() == len(shared.data.train_y)


def test_stragglers_are_a_function_of_seed_partition_and_round() -> None:
    given = {"straggler_share": 0.5, "straggler_speed": 0.2, "drop_out": 0.1}
    shared, again = clients_of(**given), clients_of(**given)
    done = np.array([[shared.step_budget(t, p, 100) for p in range(40)] for t in range(1, 41)])
    assert done[7, 5] == again.step_budget(8, 5, 100)
    slow = ((done > 0) & (done < 100)).any(0)
    assert 10 <= slow.sum() <= 30
    assert 0.05 < (done == 0).mean() < 0.15
    managed = done[:, slow][done[:, slow] > 0]
    assert managed.min() >= 20
    assert 50 < managed.mean() < 70
    assert all(len(set(steps) - {0}) == 1 for steps in done[:, slow].T)  # its own speed
    assert len({*done[:, slow].max(0)}) > 5
    assert {*done[:, ~slow].ravel()} == {0, 100}
    assert clients_of().step_budget(1, 0, 100) == 100
    assert {clients_of(drop_out=0.5).step_budget(1, p, 9) for p in range(9)} == {0, 9}
