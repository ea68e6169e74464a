"""Which examples the clients and the server have, and who is slow: from the seed alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from flwr_regs.experiments.partition.client_data import ClientData, client_data_of
from flwr_regs.experiments.settings import Settings, key


def clients_of(**settings: Any) -> ClientData:
    return client_data_of(Settings.of({key(name): value for name, value in settings.items()}))


def test_runs_that_share_their_data_settings_share_the_clients_data() -> None:
    shared = clients_of(lr=0.1, rounds=3, methods="FedAvg")
    assert shared is clients_of(lr=0.2, rounds=5, methods="FedFOR")
    assert shared is not clients_of(seed=8)
    assert shared.hash == clients_of(swap_probability=0.9).hash != clients_of(seed=8).hash
    assert shared.label_counts.sum() == len(shared.data.train_y)


def test_what_is_held_out_is_not_trained_on_and_the_server_tests_on_it() -> None:
    shared = clients_of(held_out_share=0.25)
    pairs = [shared.split(rows) for rows in shared.parts]
    assert [len(held_out) for held_out, _ in pairs] == [len(rows) // 4 for rows in shared.parts]
    of_training, rows = shared.server_rows()
    assert of_training
    assert sorted(rows) == sorted(np.concatenate([held_out for held_out, _ in pairs]))
    assert not {*rows.tolist()} & {*np.concatenate([trained for _, trained in pairs]).tolist()}


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
    again = ClientData(Settings.of({key(k): v for k, v in given.items()}), shared.data, 10)
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
