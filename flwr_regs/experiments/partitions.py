"""Partitions: which examples each client holds, as the papers split a data set. numpy only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PARTITIONS = {
    "shards": "shards-per-client label-sorted shards of one label each",
    "shards-mcmahan": "shards-per-client label-sorted shards of equal size; one may hold two labels",
    "classes": "exactly classes-per-client classes",
    "dirichlet-hsu": "clients of equal size, each with class shares drawn by dirichlet-alpha",
    "dirichlet-niid-bench": "each class spread over the clients by shares drawn by dirichlet-alpha",
    "dirichlet": "another name of dirichlet-niid-bench",
    "similarity": "similarity per cent of the data at random, the rest sorted by label",
    "iid": "at random",
}
"""Name -> what each client gets, in one line."""
FEWEST = 10
"""Examples that each client gets of a class-wise Dirichlet split, as in NIID-Bench."""
TRIES = 1000


def partition(
    labels: Array,
    kind: str,
    num_clients: int,
    seed: int,
    *,
    shards_per_client: int = 2,
    classes_per_client: int = 2,
    dirichlet_alpha: float = 0.1,
    similarity: float = 0.0,
) -> list[Array]:
    """Split ``range(len(labels))`` into `num_clients` index arrays, drawn from `seed` alone.

    Every example goes to exactly one client.

    ``shards``
        FedADC's sort-and-partition (Ozfatura et al. 2021, Sec. IV-B2): at most s = `shards_per_client`
        labels for each client. The examples are sorted by label and cut into n·s shards of one label each,
        as equal in size as can be; each client gets s of them at random. With fewer shards than labels this
        is ``shards-mcmahan``.
    ``shards-mcmahan``
        McMahan et al. (2017), Sec. 3: n·s shards of equal size. Where classes differ in size, some of them
        hold two labels. Where none does, this is ``shards``.
    ``classes``
        EFL's (Ma et al. 2021, Sec. 5.2): exactly m = `classes_per_client` classes for each client. Classes
        are cut into n·m blocks as for ``shards``, and no client gets two of one class.
    ``dirichlet-hsu``
        Hsu et al. (2019): clients of equal size. Each draws class shares q from Dir(α · prior), the prior
        being the data's class shares, and its examples by q without replacement. When a class runs
        out, q is renormalised over the others. So the last clients get what the first have left.
    ``dirichlet-niid-bench``, ``dirichlet``
        Yurochkin et al. (2019) and NIID-Bench (Li et al. 2022): each class is spread over the clients by
        shares from Dir(α), drawn again until each client has 10 examples. NIID-Bench's code also gives
        nothing more to a client that has 1/n of the data; its paper does not, and nor does this.
    ``similarity``
        rFedAvg's (Wang et al. 2023, Sec. VI): this per cent of the data is IID, the rest is sorted by
        label and cut in order.
    ``iid``
        At random.

    Raises ValueError, with the reason, for a split that is impossible.
    """
    if kind not in PARTITIONS:
        raise ValueError(f"partition must be one of {', '.join(PARTITIONS)}, not {kind!r}")
    if not 0 <= similarity <= 100:
        raise ValueError(f"similarity must be from 0 to 100 per cent, not {similarity}")
    if not dirichlet_alpha > 0:
        raise ValueError(f"dirichlet_alpha must be above 0, not {dirichlet_alpha}")
    labels = np.asarray(labels)
    rng = np.random.default_rng(seed)
    n = num_clients
    split: dict[str, Callable[[], list[Array]]] = {
        "iid": lambda: np.array_split(rng.permutation(len(labels)), n),
        "shards": lambda: _shards(labels, n, shards_per_client, rng),
        "shards-mcmahan": lambda: _dealt(_equal_shards(labels, n * shards_per_client), n, rng),
        "classes": lambda: _classes(labels, n, classes_per_client, rng),
        "dirichlet-hsu": lambda: _by_client(labels, n, dirichlet_alpha, rng),
        "dirichlet-niid-bench": lambda: _by_class(labels, n, dirichlet_alpha, rng),
        "dirichlet": lambda: _by_class(labels, n, dirichlet_alpha, rng),
        "similarity": lambda: _similarity(labels, n, similarity, rng),
    }
    try:
        if n > len(labels):
            raise ValueError("each client needs an example: use fewer clients")
        parts = split[kind]()
        if empty := sum(len(p) == 0 for p in parts):
            raise ValueError(f"{empty} of the clients would get no data: use fewer clients")
    except ValueError as error:
        what = f"partition '{kind}' of {len(labels)} examples over {n} clients"
        raise ValueError(f"{what}: {error}") from error
    return parts


def _shards(labels: Array, n: int, s: int, rng: np.random.Generator) -> list[Array]:
    classes = _by_label(labels)
    if len(classes) > n * s:
        return _dealt(_equal_shards(labels, n * s), n, rng)
    sizes = np.array([len(rows) for rows in classes])
    cuts = _cuts(sizes, min(n * s, len(labels)), sizes)
    shards = [part for c, k in zip(classes, cuts, strict=True) for part in np.array_split(c, k)]
    return _dealt(shards, n, rng)


def _equal_shards(labels: Array, count: int) -> list[Array]:
    return np.array_split(np.argsort(labels, kind="stable"), count)


def _dealt(shards: list[Array], n: int, rng: np.random.Generator) -> list[Array]:
    """Return the hands of n clients that get the shards at random."""
    hands = np.array_split(rng.permutation(len(shards)), n)
    return [np.concatenate([shards[j] for j in hand]) for hand in hands]


def _classes(labels: Array, n: int, m: int, rng: np.random.Generator) -> list[Array]:
    classes = _by_label(labels)
    sizes = np.array([len(rows) for rows in classes])
    most = np.minimum(sizes, n)  # clients that a class can serve
    if m > len(classes):
        raise ValueError(
            f"no client can hold {m} classes of {len(classes)}: use fewer classes-per-client"
        )
    if len(classes) > n * m:
        raise ValueError(
            f"with {m} classes for each client, {len(classes) - n * m} of {len(classes)} classes would "
            "be left out: use more clients or classes-per-client"
        )
    if most.sum() < n * m:
        raise ValueError(
            f"the classes are too small to serve {n} clients with {m} classes each: use fewer "
            "clients or classes-per-client"
        )
    left = _cuts(sizes, n * m, most)  # blocks of each class that no client has yet
    blocks = [np.array_split(rng.permutation(c), k) for c, k in zip(classes, left, strict=True)]
    parts: dict[int, Array] = {}
    for others, client in enumerate(rng.permutation(n)):
        # m draws without replacement, by what is left (Efraimidis, Spirakis 2006). A class with as many
        # blocks as there are clients left comes first, or some client would have to take it twice.
        key = rng.exponential(size=len(left)) / np.maximum(left, 1e-300)
        mine = np.argsort(np.where(left == n - others, -1.0, key))[:m]
        left[mine] -= 1
        parts[client] = np.concatenate([blocks[c].pop() for c in mine])
    return [parts[client] for client in range(n)]


def _by_client(labels: Array, n: int, alpha: float, rng: np.random.Generator) -> list[Array]:
    classes = [rng.permutation(rows) for rows in _by_label(labels)]
    left = np.array([len(rows) for rows in classes])
    prior = left / len(labels)
    parts = []
    for client in range(n):
        size = len(labels) // n + (client < len(labels) % n)
        shares = rng.dirichlet(alpha * prior)
        taken = np.zeros_like(left)
        while taken.sum() < size:
            there = taken < left
            shares = np.where(there, shares, 0.0)
            if not shares.sum() > 0:  # all that it drew is gone: the rest of a Dirichlet is one too
                shares[there] = rng.dirichlet(alpha * prior[there])
            drawn = rng.multinomial(size - taken.sum(), shares / shares.sum())
            taken = np.minimum(taken + drawn, left)
        left = left - taken
        parts.append(
            np.concatenate([c[k : k + t] for c, k, t in zip(classes, left, taken, strict=True)])
        )
    return parts


def _by_class(labels: Array, n: int, alpha: float, rng: np.random.Generator) -> list[Array]:
    classes = _by_label(labels)
    if len(labels) < FEWEST * n:
        raise ValueError(
            f"each client needs {FEWEST} examples: use fewer clients or partition=dirichlet-hsu"
        )
    best = n
    for _ in range(TRIES):
        parts: list[list[Array]] = [[] for _ in range(n)]
        for c in classes:
            mine = rng.permutation(c)
            cuts = np.cumsum(rng.dirichlet(np.full(n, alpha)))[:-1] * len(mine)
            for client, chunk in zip(parts, np.split(mine, cuts.astype(int)), strict=True):
                client.append(chunk)
        joined = [np.concatenate(p) for p in parts]
        short = sum(len(p) < FEWEST for p in joined)
        if short == 0:
            return joined
        best = min(best, short)
    raise ValueError(
        f"no draw of {TRIES} gave each client {FEWEST} examples, and the best left {best} with fewer: use "
        "fewer clients, a larger dirichlet-alpha, or partition=dirichlet-hsu"
    )


def _similarity(labels: Array, n: int, percent: float, rng: np.random.Generator) -> list[Array]:
    order = rng.permutation(len(labels))
    cut = round(len(labels) * percent / 100)
    rest = order[cut:]
    rest = rest[np.argsort(labels[rest], kind="stable")]
    return [
        np.concatenate(pair)
        for pair in zip(np.array_split(order[:cut], n), np.array_split(rest, n), strict=True)
    ]


def _by_label(labels: Array) -> list[Array]:
    """Return the examples of each label that occurs, in order."""
    return [np.flatnonzero(labels == c) for c in np.unique(labels)]


def _cuts(sizes: Array, total: int, most: Array) -> Array:
    """Return into how many blocks to cut each class: `total` in all, at least 1 and at most `most` each.

    The blocks are as equal as can be: the sum of their squared sizes is the least possible. That sum is
    convex in a class's number of blocks, so each further block goes where it lowers it most. Among equals
    it goes to the last class: equal shards of the whole, where none holds two labels, are cut so.
    """

    def squares(k: Array) -> Array:
        small, larger = np.divmod(sizes, k)
        total: Array = k * small**2 + larger * (2 * small + 1)
        return total

    cuts = np.ones_like(sizes)
    for _ in range(total - len(sizes)):
        gain = np.where(cuts < most, squares(cuts) - squares(cuts + 1), -1)
        cuts[len(gain) - 1 - np.argmax(gain[::-1])] += 1
    return cuts
