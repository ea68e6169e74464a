"""Clients of this process: known without messages, and saved if they hold something."""

from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message

from flwr_regs import SCAFFOLD, InProcessGrid, SCAFFOLDClient, StackedGrid
from flwr_regs.flower.grids import grid_network
from flwr_regs.flower.grids.grid_network import GridNetwork
from flwr_regs.server.exchange.network import Request
from flwr_regs.server.population.population import Population
from flwr_regs.testing.problem import app_of, make_clients
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel
from tests.conftest import Log, Watching, close, run

CLIENTS = 6
APP = app_of(SCAFFOLDClient, make_clients(CLIENTS))


def trained(grid: Any, rounds: int) -> tuple[Any, list[list[int]]]:
    """Train a share of the clients; return the model and the cohorts."""
    settings = {"seed": 4, "fraction_train": 0.34, "fraction_evaluate": 0.0, "min_train_nodes": 1}
    strategy = SCAFFOLD(**settings)
    model = run(strategy, SCAFFOLDClient, grid=grid, rounds=rounds, clients=make_clients(CLIENTS))
    return model, [entry["cohort"] for entry in strategy.history]


def test_what_a_grid_knows_is_what_its_clients_say() -> None:
    """A grid that handles messages itself sees all of them, and ends at the same model."""

    def identify(grid: Any) -> dict[int, Any]:
        nodes = list(grid.get_node_ids())
        request = Request(keys.IDENTIFY, {n: Parcel() for n in nodes}, {n: n for n in nodes})
        replies = GridNetwork(grid).ask(request)
        assert not replies.failures
        return {n: dict(parcel.config) for n, parcel in replies.came.items()}

    asked = Watching(APP, CLIENTS)  # so clients are asked, as where Flower runs them
    said = identify(asked)
    assert asked.kinds == [keys.IDENTIFY] * CLIENTS
    assert identify(InProcessGrid(APP, CLIENTS)) == identify(StackedGrid(APP, CLIENTS)) == said
    (a, cohorts), (b, same) = trained(asked, 3), trained(InProcessGrid(APP, CLIENTS), 3)
    assert asked.kinds.count(keys.IDENTIFY) == 2 * CLIENTS
    close(a, b, 0.0)
    assert cohorts == same


def test_a_partition_id_that_is_no_whole_number_is_refused_by_name() -> None:
    grid = InProcessGrid(APP, CLIENTS)
    for node, odd in {1000: "a", 1001: 0.5, 1002: "2"}.items():
        grid._contexts[node].node_config["partition-id"] = odd
    who = Population(2, CLIENTS, 30.0)
    assert who.refresh(GridNetwork(grid)) == [2, 3, 4, 5]
    assert "reports the partition-id 'a', expected" in who.refused[1000]
    assert "reports the partition-id 0.5, expected" in who.refused[1001]


class Busy(Watching):
    """Replies come at the third look."""

    replies_at_once, looks = False, 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.looks += 1
        return super().pull_messages(message_ids if self.looks > 2 * CLIENTS else [])


def test_the_log_says_once_that_nodes_are_slow_to_report_their_partition(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid_network, "SLOW", 0.0)
    trained(Busy(APP, CLIENTS), 2)
    late = "6 of 6 connected nodes have not reported their partition after 0 s"
    assert log("connected nodes") == [f"{late}; at most 60 s more"]


def test_a_snapshot_holds_those_that_keep_something_and_goes_back() -> None:
    grid = InProcessGrid(APP, CLIENTS)
    _, ((*cohort,),) = trained(grid, 1)
    keeping = {1000 + p for p in cohort}
    first = grid.snapshot()
    assert {n for n, state in first.items() if state} == keeping
    assert first.keys() == keeping | {1000, 1000 + CLIENTS - 1}
    before = {n: dict(s.items()) for n, s in first.items()}
    for node in grid.get_node_ids():
        grid._contexts[node].state["mine"] = ConfigRecord({"x": 1})
    assert {n: dict(s.items()) for n, s in first.items()} == before  # not changed by later rounds
    assert len(grid.snapshot()) == CLIENTS
    grid.restore(first)
    held = {n: dict(c.state.items()) for n, c in grid._contexts.items() if c.state}
    assert held == {n: s for n, s in before.items() if s}


def test_a_snapshot_of_other_clients_is_refused() -> None:
    grid = InProcessGrid(APP, CLIENTS)
    for number, states in ((CLIENTS - 1, None), (CLIENTS + 1, None), (0, {})):
        why = rf"holds the state of {number} clients, but this grid has {CLIENTS}"
        with pytest.raises(ValueError, match=why):
            grid.restore(InProcessGrid(APP, number).snapshot() if states is None else states)
