"""Which clients a round asks: seeded, and if wanted covering every class."""

from collections import Counter

import numpy as np
import pytest

from flwr_regs.server.exchange.exchange import Remembered
from flwr_regs.server.population import cohorts
from flwr_regs.server.population.cohorts import TRAINING, class_covering_cohort, uniform_cohort


def test_cohorts_cover_every_class_and_are_seeded() -> None:
    holds = {c: {c % 10, (c + 1) % 10} for c in range(50)}

    def covering(t: int) -> list[int]:
        return class_covering_cohort(holds, (3, t), 12, {*range(10)}, TRAINING)

    drawn = [covering(t) for t in range(40)]
    for cohort in drawn:
        assert len(set(cohort)) == 12
        assert {i for c in cohort for i in holds[c]} == set(range(10))
    assert drawn == [covering(t) for t in range(40)]
    assert len({tuple(c) for c in drawn}) == 40
    plain = [uniform_cohort(holds, (3, t), 12) for t in range(40)]
    assert any({i for c in p for i in holds[c]} != set(range(10)) for p in plain)


def test_impossible_coverage_is_an_error() -> None:
    with pytest.raises(cohorts.CoverageError, match="found no cohort of 2 clients"):
        class_covering_cohort({c: {c} for c in range(3)}, (0, 1), 2, {0, 1, 2}, TRAINING)


def test_a_cover_is_found_where_greed_alone_fails() -> None:
    """Two clients hold everything between them; 201 others hold more new classes at first sight."""
    holds = {c: {0, 1, 3, 4} for c in range(201)} | {201: {0, 1, 2}, 202: {3, 4, 5}}
    assert class_covering_cohort(holds, (0, 1), 2, {*range(6)}, TRAINING) == [201, 202]


@pytest.mark.parametrize("base", [0, 2**40])
def test_a_cohort_is_uniform_and_seeded(base: int) -> None:
    """Of partitions, and of nodes without one, whose ids are large."""
    clients = range(base, base + 20)
    drawn = [uniform_cohort(clients, (7, t), 5) for t in range(400)]
    assert drawn == [uniform_cohort(reversed(clients), (7, t), 5) for t in range(400)]
    counts = Counter(c for cohort in drawn for c in cohort)
    assert sorted(counts) == list(clients)
    assert all(abs(n - 100) < 45 for n in counts.values())  # 5 standard deviations
    assert all(cohort == sorted(set(cohort)) for cohort in drawn)
    assert uniform_cohort(clients, (7, 1), 99) == list(clients)


def test_a_missing_client_is_replaced_and_the_rest_of_the_cohort_stays() -> None:
    cohort = uniform_cohort(range(30), (3, 1), 8)
    others = uniform_cohort([c for c in range(30) if c != cohort[2]], (3, 1), 8)
    assert len(set(cohort) & set(others)) == 7


def test_a_cohort_does_not_follow_from_the_clients_own_seeds() -> None:
    """Training, evaluation, a further attempt, and a client's shuffling are draws of their own."""
    clients = range(40)
    own = [np.random.default_rng(np.random.SeedSequence((5, 2, pid))).random() for pid in clients]
    by_own_seeds = sorted(int(pid) for pid in np.argsort(own)[:10])
    purposes = (TRAINING, cohorts.EVALUATION, cohorts.further(1), cohorts.further(2))
    drawn = [uniform_cohort(clients, (5, 2), 10, purpose) for purpose in purposes]
    assert len({tuple(c) for c in (by_own_seeds, *drawn)}) == 5
    first = np.random.SeedSequence((5, 2, 0)).generate_state(4).tolist()  # client 0's
    streams = [np.random.SeedSequence((5, 2), spawn_key=p).generate_state(4) for p in purposes]
    assert first not in [stream.tolist() for stream in streams]
    told = [Remembered().entries(pid, 5, t)["regs.seed"] for t in (1, 2) for pid in clients]
    assert len({*told}) == 80  # of each client and round its own
