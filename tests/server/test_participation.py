"""Who takes part in a round, and which round of the schedule it is."""

from __future__ import annotations

from flwr_regs.server.aggregation import Reply
from flwr_regs.server.participation import Participation


def test_the_last_client_is_never_dropped() -> None:
    who = Participation("average", 1e-9, False)
    for _ in range(3):
        who.usable([0, 1], {}, {})
    assert who.remaining([0, 1], 4, 10, {}) == [1]


def test_a_client_that_comes_and_goes_restarts_the_schedule_only_twice() -> None:
    who = Participation("average", None, True)
    there = [[0, 1], [0], [0, 1], [0], [0, 1], [0], [0, 1]]
    at = [who.remaining(m, t, 7, {}) and who.schedule_round(t) for t, m in enumerate(there, 1)]
    assert at == [1, 1, 2, 3, 4, 5, 6]


def test_dropped_clients_are_taken_back_when_nobody_else_is_left() -> None:
    who = Participation("average", 1e-9, False)
    reply = Reply({}, {}, {}, 1.0)
    for _ in range(3):
        who.usable([0, 1], {1: reply}, {})
    assert who.remaining([0, 1], 4, 10, {}) == [1]
    assert who.remaining([0], 5, 10, {}) == [0]
