"""Accidents on a real federation: the run goes on or is resumed, and the history names what was lost."""

import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

import flwr_regs as fr
from benchmarks.faults import accidents
from benchmarks.faults.accident_app import Plain
from benchmarks.faults.accidents import OTHERS
from benchmarks.faults.federation import Federation
from benchmarks.faults.play import APP, Outcome
from tests.conftest import close, start
from tests.flower.test_rounds import Lossy
from tests.processes import assert_same

pytestmark = [pytest.mark.timeout(900)]
# The others cost a minute each, and show what these, or tests in one process, show too.
flower, full = pytest.mark.flower, pytest.mark.full
Play = Callable[[Federation, Path], Outcome]
LOST_REPLY = "the reply of client 1 in round 1"
LOST_ROUND = "the work of round 2, which is trained again"
ALL = [0, 1, 2]
TASK = runpy.run_path(str(APP / "task.py"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("federation")) as running:
        yield running


@pytest.fixture
def played(shared: Federation, tmp_path: Path) -> Callable[[Play], Outcome]:
    """Plays a case on the federation."""
    if "superlink" not in shared.processes:
        shared.start_superlink()
    return lambda case: case(shared, tmp_path / "play")


def initial() -> dict[str, np.ndarray]:
    """The app's initial model."""
    return {name: tensor.numpy() for name, tensor in TASK["build"]().state_dict().items()}


def in_process(
    strategy: fr.RegStrategy, grid: fr.InProcessGrid, rounds: int
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return the history and the final model of a run in one process."""
    config = {"lr": 0.1, "local-epochs": 1}
    result = start(strategy, grid, rounds, TASK["build"], config)
    return strategy.history, {name: array.numpy() for name, array in result.arrays.items()}


def unbroken(rounds: int) -> dict[str, np.ndarray]:
    """Return the final model of a run without accidents."""
    app = fr.client_app(lambda context: Plain(int(context.node_config["partition-id"])))
    return in_process(fr.FedAvg(seed=7, fraction_evaluate=0.0), fr.InProcessGrid(app, 3), rounds)[1]


def keeping(
    folder: Path, loses: set[tuple[int, int]], rounds: int
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return what `in_process` does for the clients of `memory_lost`; replies (round, client) are lost."""
    terms = [fr.ControlVariates(1), fr.Private("2.*")]
    load = runpy.run_path(str(folder / "play/app/task.py"))["load"]

    def client_fn(context: Context) -> fr.RegClient:
        model, data, kinds = TASK["build"](), load(context.node_config), [type(t) for t in terms]
        return fr.RegClient(model, *data, terms=kinds, save_private=folder / "disk", device="cpu")

    grid = Lossy(fr.client_app(client_fn), 3, lambda number, node: (number, node - 1000) in loses)
    return in_process(fr.RegStrategy(terms, seed=7, min_replies=1, max_weight=0.6), grid, rounds)


def plain_mean(rounds: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """The model after rounds with these clients, by plain loops: each moves halfway to its number."""
    model = initial()
    for clients in rounds:
        weights = [10 + pid for pid in clients]
        for name, value in model.items():
            moved = [(value + pid) / 2 for pid in clients]
            model[name] = sum(w * m for w, m in zip(weights, moved, strict=True)) / sum(weights)
    return {name: value.astype(np.float32) for name, value in model.items()}


LOSSES: dict[str, tuple[str, str, list[list[int]]]] = {
    "client_dies": ("error code 8", LOST_REPLY, [OTHERS, ALL]),
    "node_killed": ("error code 5", LOST_REPLY, [OTHERS, OTHERS, ALL]),  # it comes back
    "serverapp_killed": ("", LOST_ROUND, [ALL] * 2),  # a new run goes on
    "superlink_killed": ("", LOST_ROUND, [ALL] * 2),  # keys and runs are in the database
}


def marked(mark: Any, *names: str) -> list[Any]:
    return [pytest.param(name, marks=mark) for name in names]


@flower
def test_what_clients_keep_outlives_a_lost_reply_a_killed_node_and_superlink_and_a_new_run(
    played: Callable[[Play], Outcome], tmp_path: Path
) -> None:
    """The end, and each client's evaluations, are those of one process with the same replies lost.

    Client 1 was killed with its reply of round 2 on its disk, and missed round 3. The SuperLink was killed
    in round 4, and all Contexts were lost: keys and runs are in its database. What is pinned
    (``private="2.*"``) is in no model of the server.
    """
    outcome = played(accidents.memory_lost)
    assert "error code 5" in outcome.sees
    assert [e["replies"] for e in outcome.history] == [ALL, OTHERS, OTHERS, ALL]
    assert outcome.lost == "the reply of client 1 in round 2"
    assert not any(e["lost_state"] + e["lost_private"] for e in outcome.history)
    assert sorted(outcome.model) == ["0.bias", "0.weight"]
    history, model = keeping(tmp_path, {(2, 1), (3, 1)}, rounds=4)
    assert "1" in outcome.history[3]["evaluate"]["clients"]
    for there, here in zip(outcome.history, history, strict=True):
        for pid, told in there["evaluate"]["clients"].items():
            measured = here["evaluate"]["clients"][int(pid)]
            if (there["round"], pid) != (3, "1"):  # there alone, it trained
                assert told == {n: pytest.approx(v, abs=1e-6) for n, v in measured.items()}
    close(outcome.model, model, 0.0)


@pytest.mark.parametrize(
    "name",
    [
        *marked(full, "client_dies", "node_killed", "superlink_killed"),
        *marked(flower, "serverapp_killed"),
    ],
)
def test_the_run_goes_on_without_what_was_lost(
    name: str, played: Callable[[Play], Outcome]
) -> None:
    """A resumed run ends at the bits of an unbroken one."""
    (says, lost, replies), outcome = LOSSES[name], played(getattr(accidents, name))
    assert says in outcome.sees
    assert outcome.lost == lost
    assert [entry["replies"] for entry in outcome.history] == replies
    assert_same(outcome.model, plain_mean(replies))
    if lost == LOST_ROUND:
        close(outcome.model, unbroken(rounds=2), 0.0)


@full
def test_restarted_with_keys(played: Callable[[Play], Outcome]) -> None:
    """Flower refuses the key for up to 60 s, and forgets the message; round 1 goes on without it.

    Whether the node is back in round 2 depends on when Flower notices that it was gone.
    """
    outcome = played(accidents.restarted_with_keys)
    assert "Failed to activate SuperNode. (exit status 1)" in outcome.sees
    assert "no reply" in outcome.sees
    assert outcome.lost == LOST_REPLY
    used = [entry["replies"] for entry in outcome.history]
    assert used in ([OTHERS, OTHERS], [OTHERS, ALL])
    assert_same(outcome.model, plain_mean(used))


TURNED_AWAY = {
    "unknown_key": "Failed to activate SuperNode",
    "clock_ahead": "activate-node 401",
    "unsigned_app": "The FAB could not be verified",
}


@pytest.mark.parametrize(
    "name", [*marked(flower, "unknown_key", "clock_ahead"), *marked(full, "unsigned_app")]
)
def test_who_is_not_trusted_is_turned_away(
    name: str, played: Callable[[Play], Outcome], shared: Federation
) -> None:
    """The others stay connected."""
    assert TURNED_AWAY[name] in played(getattr(accidents, name)).sees
    assert all(shared.processes[f"node{i}"].poll() is None for i in OTHERS)
