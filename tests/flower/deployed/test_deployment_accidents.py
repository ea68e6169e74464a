"""Accidents on a real federation: the run goes on or is resumed, and the history names what was lost."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.flower.deployed import accidents
from tests.flower.deployed.accidents import Outcome
from tests.flower.deployed.federation import Federation
from tests.processes import assert_same

pytestmark = [pytest.mark.timeout(900)]
# The others cost a minute each, and show what tests in one process show too.
flower, full = pytest.mark.flower, pytest.mark.full
Case = Callable[[Federation, Path], Outcome]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("federation")) as running:
        yield running


@pytest.fixture
def played(shared: Federation, tmp_path: Path) -> Iterator[Callable[[Case], Outcome]]:
    """Plays a case on the federation; then the nodes are started anew for the next."""
    yield lambda case: case(shared, tmp_path / "play")
    if "superlink" not in shared.processes:
        shared.start_superlink()
    shared.restart_nodes()


def plain_mean(rounds: list[list[int]]) -> dict[str, np.ndarray]:
    """The model after rounds with these clients, by plain loops: each moves halfway to its number."""
    model = accidents.initial()
    for clients in rounds:
        weights = [10 + pid for pid in clients]
        for name, value in model.items():
            moved = [(value + pid) / 2 for pid in clients]
            model[name] = sum(w * m for w, m in zip(weights, moved, strict=True)) / sum(weights)
    return {name: value.astype(np.float32) for name, value in model.items()}


def test_the_oracle_is_a_run_in_one_process() -> None:
    assert_same(accidents.unbroken(rounds=3), plain_mean([[0, 1, 2]] * 3))


def check_one_reply_lost(found: Outcome, why: str, rounds: int = 2) -> None:
    """Client 1 is named in round 1 with the reason, its reply alone is missing, and the model fits."""
    assert why in found.sees
    assert found.lost == "the reply of client 1 in round 1"
    used = [entry["replies"] for entry in found.history]
    assert used == [[0, 2], *[[0, 1, 2]] * (rounds - 1)]
    assert_same(found.model, plain_mean(used))


@full
def test_accident_client_dies(played: Callable[[Case], Outcome]) -> None:
    check_one_reply_lost(played(accidents.client_dies), "error code 8")


@flower
def test_accident_node_killed(played: Callable[[Case], Outcome]) -> None:
    """It comes back with its key, and takes part in round 3."""
    found = played(accidents.node_killed)
    assert "error code 5" in found.sees
    assert found.lost == "the reply of client 1 in round 1"
    assert [entry["replies"] for entry in found.history] == [[0, 2], [0, 2], [0, 1, 2]]
    assert_same(found.model, plain_mean([[0, 2], [0, 2], [0, 1, 2]]))


@full
def test_accident_restarted_with_keys(played: Callable[[Case], Outcome]) -> None:
    """Flower refuses the key for up to 60 s, and forgets the message; round 1 goes on without it.

    Whether the node is back in round 2 depends on when Flower notices that it was gone.
    """
    found = played(accidents.restarted_with_keys)
    assert "Failed to activate SuperNode. (exit status 1)" in found.sees
    assert "no reply" in found.sees
    assert found.lost == "the reply of client 1 in round 1"
    used = [entry["replies"] for entry in found.history]
    assert used[0] == [0, 2]
    assert used[1] in ([0, 2], [0, 1, 2])
    assert_same(found.model, plain_mean(used))


@full
def test_accident_node_silent_deadline(played: Callable[[Case], Outcome]) -> None:
    found = played(accidents.node_silent_deadline)
    assert "deadline" in found.sees
    assert found.history[0]["late"] == [1]
    assert found.history[0]["replies"] == [0, 2]


@flower
def test_accident_serverapp_killed(played: Callable[[Case], Outcome]) -> None:
    """The run is reported as failed; a new one goes on to the bits of an unbroken one."""
    check_resumed(played(accidents.serverapp_killed))


@flower
def test_accident_superlink_killed(played: Callable[[Case], Outcome]) -> None:
    """Keys and runs are in the database; a new run goes on to the bits of an unbroken one."""
    check_resumed(played(accidents.superlink_killed))


def check_resumed(found: Outcome) -> None:
    assert found.lost == "the work of round 2, which is trained again"
    assert [entry["replies"] for entry in found.history] == [[0, 1, 2]] * 3
    want = plain_mean([[0, 1, 2]] * 3)
    assert_same(found.model, want)
    unbroken = accidents.unbroken(rounds=3)
    assert {n: a.tobytes() for n, a in found.model.items()} == {
        n: a.tobytes() for n, a in unbroken.items()
    }


@flower
def test_accident_unknown_key(played: Callable[[Case], Outcome], shared: Federation) -> None:
    """It is turned away; the others stay connected."""
    found = played(accidents.unknown_key)
    assert "Failed to activate SuperNode" in found.sees
    assert "exit status 1" in found.sees
    assert all(shared.processes[f"node{i}"].poll() is None for i in range(shared.nodes))


@flower
def test_accident_clock_ahead(played: Callable[[Case], Outcome]) -> None:
    found = played(accidents.clock_ahead)
    assert found.sees.endswith("activate-node 401")


@full
def test_a_node_that_trusts_signed_apps_refuses_one_of_a_folder(
    played: Callable[[Case], Outcome],
) -> None:
    found = played(accidents.unsigned_app)
    assert "The FAB could not be verified" in found.sees


@full
def test_accident_disk_full(played: Callable[[Case], Outcome]) -> None:
    """The run goes on without the checkpoint, and says so."""
    try:
        found = played(accidents.disk_full)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no right to mount a small disk: {error}; test_resume.py fills one without")
    assert "No space left on device" in found.sees
    assert_same(found.model, plain_mean([[0, 1, 2]] * 2))
