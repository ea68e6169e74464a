"""Who takes part in a round, and which round of the schedule it is."""

import flwr_regs as fr
from flwr_regs.server.population.participation import Participation
from flwr_regs.server.round import Reply, Round


def ended(who: Participation, cohort: list[int], replies: dict[int, Reply]) -> Round:
    now = Round(1, cohort=cohort, received=replies)
    who.select(now)
    who.note(now)
    return now


def test_a_claim_of_many_planned_steps_drops_nobody_else() -> None:
    """E of Eq. 9 is the clients' median: client 1 was inactive in half of its turns, 10 / (4 · 5)."""
    who = Participation(fr.FedAvg(drop_inactive=10.0).options, 4)
    honest, liar = (Reply({}, {}, {}, 1.0, steps=(1, planned)) for planned in (5, 10**15))
    idle = Reply({}, {}, {}, 1.0, steps=(0, 5))
    for t in range(4):
        ended(who, [0, 1, 2], {0: honest, 1: honest if t else idle, 2: liar})
        assert who.remaining([0, 1, 2], Round(t + 2)) == [0, 1, 2]  # not more, or one turn alone
    for _ in range(3):  # in 4 of 7
        ended(who, [0, 1, 2], {0: honest, 1: idle, 2: liar})
    assert who.remaining([0, 1, 2], Round(8)) == [0, 2]


def test_a_client_that_comes_and_goes_restarts_the_schedule_only_twice() -> None:
    who = Participation(fr.FedAvg(restart_lr=True).options, 7)
    there = [[0, 1], [0], [0, 1], [0], [0, 1], [0], [0, 1]]
    at = [who.remaining(m, Round(t)) and who.schedule_round(t) for t, m in enumerate(there, 1)]
    assert at == [1, 1, 2, 3, 4, 5, 6]


def test_dropped_clients_are_taken_back_when_nobody_else_is_left() -> None:
    who = Participation(fr.FedAvg(drop_inactive=1e-9).options, 10)
    for _ in range(3):
        ended(who, [0, 1, 2], {2: Reply({}, {}, {}, 1.0)})  # it reports no steps
    now = Round(4)
    assert who.remaining([0, 1], now) == [1]  # the last one stays
    assert now.events["dropped_for_good"] == [0]
    assert who.remaining([0], Round(5)) == [0]
