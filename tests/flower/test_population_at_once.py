"""Clients of this process: made when used, known without messages, saved if they hold something."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.clientapp import ClientApp

from flwr_regs import (
    SCAFFOLD,
    InProcessGrid,
    SCAFFOLDClient,
    StackedGrid,
)
from flwr_regs.flower.grids.grid_network import GridNetwork
from flwr_regs.server.exchange.network import Request
from flwr_regs.testing.problem import app_of, make_clients, make_model
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel

CLIENTS = 6


class Watched(InProcessGrid):
    """Counts its messages; so clients are asked, as where Flower runs them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kinds: list[str] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.kinds += [m.metadata.message_type for m in messages]
        return super().push_messages(messages)


class Delegating:
    """Another grid's messages pass through this one."""

    def __init__(self, grid: InProcessGrid) -> None:
        self.grid = grid
        self.kinds: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.kinds += [m.metadata.message_type for m in messages]
        return self.grid.push_messages(messages)


def app(client: Any = SCAFFOLDClient) -> ClientApp:
    return app_of(client, make_clients(CLIENTS))


def train(strategy: Any, grid: Any, rounds: int = 3, **more: Any) -> dict[str, np.ndarray]:
    result = strategy.start(
        grid,
        ArrayRecord(make_model().state_dict()),
        rounds,
        train_config=ConfigRecord({"lr": 0.1, "local-steps": 2}),
        **more,
    )
    return {n: a.numpy() for n, a in result.arrays.items()}


def half(**more: Any) -> Any:
    return SCAFFOLD(seed=4, fraction_train=0.34, fraction_evaluate=0.0, min_train_nodes=1, **more)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[n], b[n]) for n in a)


def identify(grid: Any) -> dict[int, Any]:
    nodes = list(grid.get_node_ids())
    request = Request(keys.IDENTIFY, {n: Parcel() for n in nodes}, {n: n for n in nodes})
    replies = GridNetwork(grid).ask(request)
    assert not replies.failures
    return {n: dict(parcel.config) for n, parcel in replies.came.items()}


@pytest.mark.parametrize("kind", [InProcessGrid, StackedGrid])
def test_what_a_grid_knows_is_what_its_clients_say(kind: Any) -> None:
    made, asked = app(), Watched(app(), CLIENTS)
    assert identify(kind(made, CLIENTS)) == identify(asked)
    assert asked.kinds == [keys.IDENTIFY] * CLIENTS


@pytest.mark.parametrize("way", [Watched, Delegating])
def test_a_grid_that_handles_messages_itself_sees_all_of_them(way: Any) -> None:
    grid = way(app(), CLIENTS) if way is Watched else way(InProcessGrid(app(), CLIENTS))
    arrays = train(strategy := half(), grid)
    assert grid.kinds.count(keys.IDENTIFY) == CLIENTS
    other = half()
    equal(arrays, train(other, InProcessGrid(app(), CLIENTS)))
    assert [e["cohort"] for e in strategy.history] == [e["cohort"] for e in other.history]


def test_a_snapshot_holds_those_that_keep_something_and_goes_back() -> None:
    grid = InProcessGrid(app(), CLIENTS)
    train(strategy := half(), grid, 1)
    trained = {1000 + p for p in strategy.history[0]["cohort"]}
    first = grid.snapshot()
    assert {n for n, state in first.items() if state} == trained
    assert first.keys() == trained | {1000, 1000 + CLIENTS - 1}
    kept = {n: dict(s.items()) for n, s in first.items()}
    for context in grid._contexts.values():
        context.state["mine"] = ConfigRecord({"x": 1})
    assert {n: dict(s.items()) for n, s in first.items()} == kept  # not changed by later rounds
    everyone = grid.snapshot()
    assert len(everyone) == CLIENTS
    grid.restore(first)
    assert {n: dict(c.state.items()) for n, c in grid._contexts.items() if c.state} == {
        n: s for n, s in kept.items() if s
    }
    another = InProcessGrid(app(), CLIENTS)
    another.restore(everyone)  # as older versions wrote them: every client
    assert all("mine" in context.state for context in another._contexts.values())


def test_a_snapshot_of_other_clients_is_refused() -> None:
    grid = InProcessGrid(app(), CLIENTS)
    for number in (CLIENTS - 1, CLIENTS + 1):
        other = InProcessGrid(app(), number)
        why = rf"holds the state of {number} clients, but this grid has {CLIENTS}"
        with pytest.raises(ValueError, match=why):
            grid.restore(other.snapshot())
    with pytest.raises(ValueError, match="holds the state of 0 clients"):
        grid.restore({})
