"""Cohorts: which of the clients that are there take part in a round. Functions of a key alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np


class CoverageError(ValueError):
    """No cohort of the asked size can hold every class."""


def uniform_cohort(clients: Iterable[int], key: tuple[int, ...], size: int) -> list[int]:
    """Return `size` clients, sorted, by `key` alone; all of them where `size` is too large.

    Each client's rank depends on (key, its own id) only: a client that is missing is replaced by one
    other, and the rest of the cohort stays.
    """
    rank = {c: np.random.default_rng((*key, c)).random() for c in clients}
    return sorted(sorted(rank, key=lambda c: rank[c])[:size])


def class_covering_cohort(
    label_counts: Mapping[int, Sequence[int]], key: tuple[int, ...], size: int
) -> list[int]:
    """Return a random cohort of `size` whose clients together hold every class (FedADC, Sec. IV-E).

    Uniform over the covering cohorts: draws that do not cover are drawn again (1,000 times). Where
    covering cohorts are rarer than that, clients are taken in random order, first those that add a
    class.

    Parameters
    ----------
    label_counts : mapping
        Client -> examples of each class; shorter lists end in zeros. Every class from 0 to the largest
        one seen must be covered.

    Raises
    ------
    CoverageError
        Naming the classes that no client holds, or that the last attempt lacked.
    """
    holds = {c: {i for i, n in enumerate(counts) if n > 0} for c, counts in label_counts.items()}
    classes = set(range(max((len(counts) for counts in label_counts.values()), default=0)))
    if missing := classes - set().union(*holds.values()):
        raise CoverageError(f"no client holds any example of the classes {sorted(missing)}")
    clients = sorted(holds)
    for attempt in range(1000):
        cohort = uniform_cohort(clients, (*key, attempt), size)
        if set().union(*(holds[c] for c in cohort)) == classes:
            return cohort
    order = [clients[i] for i in np.random.default_rng(key).permutation(len(clients))]
    chosen: list[int] = []
    left = set(classes)
    while left and len(chosen) < size:
        best = max((c for c in order if c not in chosen), key=lambda c: len(holds[c] & left))
        chosen.append(best)
        left -= holds[best]
    if left:
        raise CoverageError(
            f"found no cohort of {size} clients that holds all {len(classes)} classes: the best "
            f"attempt lacks {sorted(left)}; draw larger cohorts"
        )
    return sorted(chosen + [c for c in order if c not in chosen][: size - len(chosen)])
