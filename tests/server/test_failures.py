"""A reply becomes a value or a named failure; a step over all of them finds the culprits."""

from __future__ import annotations

from typing import Any

import pytest

from flwr_regs.server.failures import culprits, read_each
from flwr_regs.wire.arrays import ProtocolError


@pytest.mark.parametrize(
    "error",
    [
        ProtocolError("odd"),
        ValueError("odd"),
        MemoryError("odd"),
        RecursionError("odd"),
        KeyError("odd"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_whatever_is_raised_costs_one_client(error: Exception) -> None:
    def read(pid: int, reply: int) -> int:
        if pid == 1:
            raise error
        return reply * 2

    values, failures = read_each({2: 20, 1: 10, 0: 0}, read)
    assert list(values.items()) == [(0, 0), (2, 40)]
    assert list(failures) == [1]
    assert "odd" in failures[1]


def test_an_interrupt_is_not_a_client_s_doing() -> None:
    def read(pid: int, reply: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_each({0: 0}, read)


def step_of(bad: Any) -> Any:
    def step(pids: list[int]) -> None:
        if bad(set(pids)):
            raise ValueError("odd")

    return step


def test_culprits() -> None:
    everyone = [0, 1, 2, 3, 4]

    def of(bad: Any) -> set[int]:
        return set(culprits(everyone, step_of(bad), "it fails"))

    def has(*names: int) -> Any:
        return lambda pids: bool(pids & set(names))

    assert of(has()) == set()
    assert of(has(3)) == {3}
    assert of(has(0, 3)) == {0, 3}
    assert of(lambda pids: True) == set()  # not a client's doing
    assert of(lambda pids: 3 in pids and len(pids) > 2) == {3}  # harmless alone
    assert of(lambda pids: len(pids) < 2 or 3 in pids) == {3}  # needs two clients
    assert of(lambda pids: {1, 2} <= pids)  # one of two that do not go together
    assert culprits([0], step_of(lambda pids: True), "it fails") == {}


@pytest.mark.parametrize("odd", [0, 17, 62])
def test_a_culprit_among_many_is_found_in_few_steps(odd: int) -> None:
    """It fails only beside others. Looking at each client's absence would look at n² of them."""
    clients, looked_at = list(range(63)), list[int]()

    def bad(pids: set[int]) -> bool:
        looked_at.append(len(pids))
        return odd in pids and len(pids) > 1

    (why,) = culprits(clients, step_of(bad), "it fails").values()
    assert list(culprits(clients, step_of(bad), "it fails")) == [odd]
    assert why.startswith("it fails: ValueError: odd")
    assert sum(looked_at) / 2 < 4 * len(clients) * len(clients).bit_length() < len(clients) ** 2
