"""Cohorts: the clients that take part in a round. Each draw depends on a key alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

Key = tuple[int, ...]
TRAINING = (0, 0)
EVALUATION = (1, 0)
"""Purposes of a draw. Draws for different purposes are independent, whatever their keys, and none of them
is a client's own seed, which has no purpose."""
Classes = Mapping[int, set[int]]
"""Client -> the classes that it holds."""
MOST_RANKS = 1 << 22
"""Ids below this get a number each, whoever is connected."""


def further(attempt: int) -> tuple[int, int]:
    """Return the purpose of a training cohort at an attempt at its round, from 0."""
    return (2, attempt) if attempt else TRAINING


class CoverageError(ValueError):
    """No cohort of the requested size was found whose clients together hold the classes."""


def uniform_cohort(
    clients: Iterable[int], key: Key, size: int, purpose: Key = TRAINING
) -> list[int]:
    """Return `size` clients, sorted, by (key, purpose) alone; all of them if `size` is too large.

    A partition's rank depends only on (key, purpose, its id). If a client is missing, another one replaces
    it and the rest of the cohort stays. Clients known by node ids, which are large, are ranked by place.
    """
    return _drawn(sorted(clients), size, _generator(key, purpose))


def _generator(key: Key, purpose: Key) -> np.random.Generator:
    # a purpose, not a longer key: SeedSequence treats (s, t) and (s, t, 0) as equal
    return np.random.default_rng(np.random.SeedSequence(key, spawn_key=purpose))


def _drawn(clients: list[int], size: int, generator: np.random.Generator) -> list[int]:
    """Return `size` of some sorted clients, sorted: those with the smallest numbers drawn."""
    places = clients if max(clients, default=0) < MOST_RANKS else [*range(len(clients))]
    ranks = generator.random(max(places, default=-1) + 1)[places]
    return sorted(clients[i] for i in np.argsort(ranks, kind="stable")[:size])


def class_covering_cohort(
    holds: Classes, key: Key, size: int, classes: set[int], purpose: Key
) -> list[int]:
    """Return a random cohort of `size` whose clients together hold `classes` (FedADC, Sec. IV-E).

    Uniform over the covering cohorts: a draw that does not cover is repeated, up to 1,000 times. If
    covering cohorts are rarer, a search finds one: it branches on the class that the fewest clients hold,
    over clients in random order. The rest of the cohort is then drawn at random.

    Raises CoverageError if the search finds no cohort.
    """
    clients = sorted(holds)
    generator = _generator(key, purpose)
    for _ in range(1000):
        cohort = _drawn(clients, size, generator)
        if classes <= set().union(*(holds[c] for c in cohort)):
            return cohort
    order = [clients[i] for i in generator.permutation(len(clients))]
    covering = _search(classes, size, {c: holds[c] & classes for c in order}, [100_000])
    if covering is None:
        what = f"found no cohort of {size} clients that holds all of the {len(classes)} classes"
        raise CoverageError(f"{what}; draw larger cohorts")
    return sorted(covering + [c for c in order if c not in covering][: size - len(covering)])


def _search(left: set[int], size: int, holds: Classes, budget: list[int]) -> list[int] | None:
    """Return at most `size` clients that together hold `left`, or None; `budget` bounds the steps."""
    if not left:
        return []
    budget[0] -= 1
    most = max(len(h & left) for h in holds.values())
    if budget[0] < 0 or size * most < len(left):
        return None
    rarest = min(left, key=lambda i: sum(i in h for h in holds.values()))
    holders = [c for c, h in holds.items() if rarest in h]
    for client in sorted(holders, key=lambda c: -len(holds[c] & left)):
        rest = _search(left - holds[client], size - 1, holds, budget)
        if rest is not None:
            return [client, *rest]
    return None
