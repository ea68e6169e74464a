"""Splits by labels, and by groups (writer, speaker, user, domain). See `partitions.partition`.

The function of a partition has its name, with ``_`` for ``-``. It takes the labels or groups of the
examples, the number of clients, a generator and the settings, and returns each client's examples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from flwr_regs.experiments.partition import shifts
from flwr_regs.experiments.settings import Settings

Array = np.ndarray[Any, Any]
Rng = np.random.Generator

FEWEST = 10
"""Examples that each client gets at least where NIID-Bench draws the sizes."""
TRIES = 1000


def iid(labels: Array, n: int, rng: Rng, s: Settings) -> list[Array]:
    """Return a random split into equal parts."""
    return np.array_split(rng.permutation(len(labels)), n)


noise = iid


def shards(labels: Array, n: int, rng: Rng, s: Settings, one_label: bool = True) -> list[Array]:
    """Return FedADC's sort-and-partition: each of n clients gets s shards of one label each.

    Or McMahan et al.'s, with shards of equal size, without `one_label` or with fewer shards than labels.
    """
    classes, count = _by_label(labels), n * s.shards_per_client
    if count > len(labels):
        hint = "use fewer clients or shards-per-client"
        raise ValueError(f"{count} shards of {len(labels)} examples: some would be empty: {hint}")
    shards = np.array_split(np.concatenate(classes), count)
    if one_label and len(classes) <= count:
        sizes = np.array([len(rows) for rows in classes])
        cuts = zip(classes, _cuts(sizes, count, sizes), strict=True)
        shards = [part for rows, k in cuts for part in np.array_split(rows, k)]
    hands = np.array_split(rng.permutation(count), n)
    return [np.concatenate([shards[j] for j in hand]) for hand in hands]


shards_mcmahan = partial(shards, one_label=False)


def classes(labels: Array, n: int, rng: Rng, s: Settings) -> list[Array]:
    """Return EFL's split: exactly m classes for each of n clients."""
    classes, m = _by_label(labels), s.classes_per_client
    sizes = np.array([len(rows) for rows in classes])
    most = np.minimum(sizes, n)  # clients that a class can serve
    if m > len(classes):
        what = f"no client can hold {m} of {len(classes)} classes"
        raise ValueError(f"{what}: use fewer classes-per-client")
    if len(classes) > n * m:
        out = f"{len(classes) - n * m} of {len(classes)} classes would be left out"
        raise ValueError(f"{out} with {m} for each client: use more clients or classes-per-client")
    if most.sum() < n * m:
        raise ValueError("the classes are too small: use fewer clients or classes-per-client")
    left = _cuts(sizes, n * m, most)  # blocks of each class that no client has yet
    blocks = [np.array_split(rng.permutation(c), k) for c, k in zip(classes, left, strict=True)]
    parts: dict[int, Array] = {}
    for others, client in enumerate(rng.permutation(n)):
        # m draws without replacement, by what is left (Efraimidis, Spirakis 2006). A class with as many
        # blocks as there are clients left comes first, or some client would have to take it twice.
        key = rng.exponential(size=len(left)) / np.maximum(left, 1e-300)
        chosen = np.argsort(np.where(left == n - others, -1.0, key))[:m]
        left[chosen] -= 1
        parts[client] = np.concatenate([blocks[c].pop() for c in chosen])
    return [parts[client] for client in range(n)]


def dirichlet_hsu(labels: Array, n: int, rng: Rng, s: Settings) -> list[Array]:
    """Return Hsu et al.'s split: each of n equal clients draws class shares from Dir(α · prior)."""
    classes = [rng.permutation(rows) for rows in _by_label(labels)]
    left = np.array([len(rows) for rows in classes])
    alphas = s.dirichlet_alpha * (left / len(labels))
    sizes = map(len, np.array_split(labels, n))
    return [_take(classes, left, _drawn(size, alphas, left, rng)) for size in sizes]


def pachinko(labels: Array, n: int, rng: Rng, s: Settings) -> list[Array]:
    """Return Reddi et al.'s split: shares of coarse labels from Dir(α), of their fine labels from Dir(β).

    `labels` are both, ``(2, n)``.

    Examples are drawn by them without replacement. A fine label that runs out leaves its share to the
    others of its coarse label, and a coarse label to the other coarse labels.
    """
    coarse, fine = labels
    branches = [(rows, _by_label(fine[rows])) for rows in _by_label(coarse)]
    trees = [[rng.permutation(rows[leaf]) for leaf in leaves] for rows, leaves in branches]
    left = [np.array([len(leaf) for leaf in tree]) for tree in trees]
    parts = []
    for of_client in np.array_split(coarse, n):
        room, alphas = np.array([*map(np.sum, left)]), np.full(len(trees), s.pachinko_alpha)
        chunks = []
        for i, count in enumerate(_drawn(len(of_client), alphas, room, rng)):
            if count:
                betas = np.full(len(trees[i]), s.pachinko_beta)
                chunks.append(_take(trees[i], left[i], _drawn(count, betas, left[i], rng)))
        parts.append(np.concatenate(chunks))
    return parts


def _drawn(size: int, concentration: Array, left: Array, rng: Rng) -> Array:
    """Return how many of each kind to take: `size` by shares from a Dirichlet, at most what is `left`.

    When a kind runs out, the shares are those of the others, scaled to sum to 1.
    """
    shares = rng.dirichlet(concentration)
    taken = np.zeros_like(left)
    while taken.sum() < size:
        there = taken < left
        shares = np.where(there, shares, 0.0)
        if not shares.sum() > 0:  # all that it drew is gone: the rest of a Dirichlet is one too
            shares[there] = rng.dirichlet(concentration[there])
        drawn = rng.multinomial(size - taken.sum(), shares / shares.sum())
        taken = np.minimum(taken + drawn, left)
    return taken


def _take(kinds: list[Array], left: Array, counts: Array) -> Array:
    """Return the next examples of each kind, so many; of what is `left` they are gone then."""
    left -= counts
    return np.concatenate([c[k : k + t] for c, k, t in zip(kinds, left, counts, strict=True)])


def dirichlet_niid_bench(labels: Array, n: int, rng: Rng, s: Settings) -> list[Array]:
    """Return NIID-Bench's split: each class is spread over n clients by shares from Dir(α)."""
    classes = _by_label(labels)
    if len(labels) < FEWEST * n:
        what = f"each client needs {FEWEST} examples"
        raise ValueError(f"{what}: use fewer clients or partition=dirichlet-hsu")

    def draw() -> list[Array]:
        alpha = s.dirichlet_alpha
        return _joined(*(_in_shares(rng.permutation(c), n, alpha, rng) for c in classes))

    return _first_enough(draw, "a larger dirichlet-alpha, or partition=dirichlet-hsu")


dirichlet = dirichlet_niid_bench


def _in_shares(rows: Array, n: int, alpha: float, rng: Rng) -> list[Array]:
    """Return the rows cut into n parts, in shares from Dir(α)."""
    cuts = np.cumsum(rng.dirichlet(np.full(n, alpha)))[:-1] * len(rows)
    return np.split(rows, cuts.astype(int))


def _first_enough(draw: Callable[[], list[Array]], hint: str) -> list[Array]:
    """Return the first of `TRIES` draws that gives each client `FEWEST` examples."""
    for _ in range(TRIES):
        parts = draw()
        if min(map(len, parts)) >= FEWEST:
            return parts
    none = f"no draw of {TRIES} gave each client {FEWEST} examples"
    raise ValueError(f"{none}: use fewer clients, {hint}")


def quantity(labels: Array, n: int, rng: Rng, s: Settings) -> list[Array]:
    """Return a random split in sizes from Dir(α), each at least `FEWEST`."""
    order = rng.permutation(len(labels))
    draw = partial(_in_shares, order, n, s.quantity_alpha, rng)
    return _first_enough(draw, "or a larger quantity-alpha")


def similarity(labels: Array, n: int, rng: Rng, s: Settings) -> list[Array]:
    """Return rFedAvg's split: so many per cent of the examples at random, the rest sorted by label."""
    order = rng.permutation(len(labels))
    cut = round(len(labels) * s.similarity / 100)
    rest = order[cut:]
    rest = rest[np.argsort(labels[rest], kind="stable")]
    return _joined(np.array_split(order[:cut], n), np.array_split(rest, n))


def _joined(*dealt: list[Array]) -> list[Array]:
    """Return what each client got in all, of examples that were dealt several times."""
    return [np.concatenate(of_client) for of_client in zip(*dealt, strict=True)]


def _by_label(labels: Array) -> list[Array]:
    """Return the examples of each label that occurs, in order."""
    return [np.flatnonzero(labels == c) for c in np.unique(labels)]


def _cuts(sizes: Array, total: int, most: Array) -> Array:
    """Return into how many blocks to cut each class: `total` in all, at least 1 and at most `most` each.

    The blocks are as equal as can be: the sum of their squared sizes is the least possible. That sum is
    convex in a class's number of blocks, so each further block goes where it lowers it most. Among equals
    it goes to the last class: equal shards of the whole, where none holds two labels, are cut so.
    """

    def squares(k: Array) -> Any:
        small, larger = np.divmod(sizes, k)
        return k * small**2 + larger * (2 * small + 1)

    cuts = np.ones_like(sizes)
    for _ in range(total - len(sizes)):
        gain = np.where(cuts < most, squares(cuts) - squares(cuts + 1), -1)
        cuts[len(gain) - 1 - np.argmax(gain[::-1])] += 1
    return cuts


def natural(groups: Array, n: int, rng: Rng, s: Settings) -> list[Array]:
    """Return one group for each of n clients: n groups at random, in order. Nobody has the others."""
    kinds = np.unique(groups)
    if n > len(kinds):
        hint = "use fewer clients, or partition=domains, where clients share a group"
        raise ValueError(f"the data has {len(kinds)} groups, one for each client: {hint}")
    chosen = np.sort(rng.permutation(len(kinds))[:n])
    return [np.flatnonzero(groups == g) for g in kinds[chosen]]


def domains(groups: Array, n: int, rng: Rng, s: Settings) -> list[Array]:
    """Return client k's share of group k mod g: a group's clients get equal random pieces of it."""
    kinds = np.unique(groups)
    parts: dict[int, Array] = {}
    for i, g in enumerate(kinds[:n]):
        clients = range(i, n, len(kinds))
        rows = rng.permutation(np.flatnonzero(groups == g))
        parts |= dict(zip(clients, np.array_split(rows, len(clients)), strict=True))
    return [parts[client] for client in range(n)]


def interpolated(groups: Array, n: int, rng: Rng, s: Settings) -> list[Array]:
    """Return the natural split with a share of the examples shuffled across clients; sizes stay.

    Each client puts a random share of its examples into a pool, and gets as many back from the shuffled
    pool.
    """
    parts = [rng.permutation(rows) for rows in natural(groups, n, rng, s)]
    cuts = [round(s.interpolation * len(rows)) for rows in parts]
    split = [np.split(rows, [cut]) for rows, cut in zip(parts, cuts, strict=True)]
    pool = rng.permutation(np.concatenate([pooled for pooled, _ in split]))
    return _joined([kept for _, kept in split], np.split(pool, np.cumsum(cuts)[:-1]))


def long_tail_rounds(labels: Array, n: int, rng: Rng, s: Settings) -> list[Array]:
    """Return what each of n clients draws for round 1."""
    drawn = {"share": s.sample_share, "ratio": s.long_tail}
    return [shifts.long_tail(labels, client, 1, s.seed, **drawn) for client in range(n)]


def test_split(train: Array, parts: list[Array], test: Array, seed: int, other: str) -> list[Array]:
    """Return each client's test examples, so that they are distributed as its training examples are.

    Of each kind (a class or group) the test examples are dealt in proportion to the training examples of
    that kind that the clients hold. Each goes to one client; those of a kind that no client has go to none.
    A client that would get none takes one of its commonest kind from the client that has most of them.

    Parameters
    ----------
    train, test : the kind of each training and test example, ``(n,)``
    parts : each client's training examples, indices into `train`
    seed : draws which test examples a client gets
    other : what else helps if a client would get none

    Raises ValueError if a client would get none.
    """
    rng = np.random.default_rng(seed)
    kinds = np.unique(train[np.concatenate(parts)])
    cells = [np.searchsorted(kinds, train[rows]) for rows in parts]
    held = np.stack([np.bincount(of, minlength=len(kinds)) for of in cells])  # of each kind
    order = np.argsort(test, kind="stable")
    ends = [np.searchsorted(test, kinds, side, sorter=order) for side in ("left", "right")]
    dealt = []
    for counts, first, last in zip(held.T, *ends, strict=True):
        rows = rng.permutation(order[first:last])
        cuts = np.rint(np.cumsum(counts)[:-1] / counts.sum() * len(rows)).astype(int)
        dealt.append(np.split(rows, cuts))
    test_parts = _joined(*dealt)
    for number, of_client in enumerate(held):
        if not len(test_parts[number]):
            commonest = kinds[of_client.argmax()]
            of_kind = [rows[test[rows] == commonest] for rows in test_parts]
            most = int(np.argmax([*map(len, of_kind)]))
            if len(of_kind[most]) > 1:
                test_parts[number] = of_kind[most][:1]
                test_parts[most] = np.setdiff1d(test_parts[most], test_parts[number])
    if none := sum(len(rows) == 0 for rows in test_parts):
        lack = f"{none} of {len(parts)} clients would get no test data by their training data's"
        raise ValueError(f"{lack} distribution: use fewer clients, or {other}")
    return test_parts
