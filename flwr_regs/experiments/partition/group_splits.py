"""Splits by groups: by writer, speaker or user; domains; examples shuffled across them; test data."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def natural(groups: Array, n: int, rng: np.random.Generator) -> list[Array]:
    """Return one group for each of n clients: n groups at random, in order. Nobody has the others."""
    kinds = np.unique(groups)
    if n > len(kinds):
        raise ValueError(
            f"the data has {len(kinds)} groups, one for each client: use fewer clients, or "
            "partition=domains, where clients share a group"
        )
    chosen = np.sort(rng.permutation(len(kinds))[:n])
    return [np.flatnonzero(groups == g) for g in kinds[chosen]]


def domains(groups: Array, n: int, rng: np.random.Generator) -> list[Array]:
    """Return client k's share of group k mod g: a group's clients get equal random pieces of it."""
    kinds = np.unique(groups)
    parts: dict[int, Array] = {}
    for i, g in enumerate(kinds[:n]):
        clients = range(i, n, len(kinds))
        rows = rng.permutation(np.flatnonzero(groups == g))
        parts |= dict(zip(clients, np.array_split(rows, len(clients)), strict=True))
    return [parts[client] for client in range(n)]


def interpolated(groups: Array, n: int, share: float, rng: np.random.Generator) -> list[Array]:
    """Return the natural split with a share of the examples shuffled across clients; sizes stay.

    Each client puts a random `share` of its examples into a pool, and gets as many back from the shuffled
    pool.
    """
    parts = [rng.permutation(rows) for rows in natural(groups, n, rng)]
    cuts = [round(share * len(rows)) for rows in parts]
    pool = rng.permutation(np.concatenate([p[:cut] for p, cut in zip(parts, cuts, strict=True)]))
    dealt = np.split(pool, np.cumsum(cuts)[:-1])
    return [np.concatenate([p[cut:], d]) for p, cut, d in zip(parts, cuts, dealt, strict=True)]


def test_split(train: Array, parts: list[Array], test: Array, seed: int) -> list[Array]:
    """Return each client's test examples, so that they are distributed as its training examples are.

    Of each kind (a class or group) the test examples are dealt in proportion to the training examples of
    that kind that the clients hold. Each goes to one client; those of a kind that no client has go to none.

    Parameters
    ----------
    train, test : the kind of each training and test example, ``(n,)``
    parts : each client's training examples, indices into `train`
    seed : draws which test examples a client gets

    Raises ValueError if a client would get none.
    """
    rng = np.random.default_rng(seed)
    kinds = np.unique(train[np.concatenate(parts)])
    cells = [i * len(kinds) + np.searchsorted(kinds, train[rows]) for i, rows in enumerate(parts)]
    size = len(parts) * len(kinds)
    held = np.bincount(np.concatenate(cells), minlength=size).reshape(
        len(parts), -1
    )  # of each kind
    order = np.argsort(test, kind="stable")
    ends = [np.searchsorted(test, kinds, side, sorter=order) for side in ("left", "right")]
    chunks_of: list[list[Array]] = [[np.zeros(0, np.int64)] for _ in parts]
    for counts, first, last in zip(held.T, *ends, strict=True):
        if first == last:
            continue
        rows = rng.permutation(order[first:last])
        cuts = np.rint(np.cumsum(counts)[:-1] / counts.sum() * len(rows)).astype(int)
        for client, chunk in zip(chunks_of, np.split(rows, cuts), strict=True):
            client.append(chunk)
    test_parts = [np.concatenate(chunks) for chunks in chunks_of]
    if none := sum(len(rows) == 0 for rows in test_parts):
        raise ValueError(
            f"{none} of {len(parts)} clients would get no test data by their training data's distribution: "
            "use fewer clients, or test-split=classes"
        )
    return test_parts
