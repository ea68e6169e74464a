"""Plain loops for tests/test_hook_contexts.py, in float64 and one client after another.

FedNova (Wang et al. 2020), q-FedAvg (Li et al. 2020), SCAFFOLD with option 2 (Karimireddy et al. 2020),
8 bits a parameter with what is left over (both ways), and Ditto (Li et al. 2021).

A run is a list of rounds, a round a list of turns in the order of the clients. Client k of a turn takes
`steps` steps through its batches, from the first and around. Its fate is ``"used"``; ``"unused"``: the
server did not use its reply, and the client learns so; ``"lost"``: it fell out before it kept anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tests.oracles.model import Batch, Client, Params, features, gradient, loss


class Turn(NamedTuple):
    """One client's part in one round."""

    k: int
    steps: int
    fate: str


@dataclass
class Told:
    """What a run shows: the model after each round, and what the method is asked for besides."""

    models: list[Params] = field(default_factory=list)
    c: list[Params] = field(default_factory=list)
    """The server's control variate after each round."""
    c_used: dict[tuple[int, int], Params] = field(default_factory=dict)
    """The control variate that client k uses in round t, by (t, k)."""
    own: list[dict[int, Params]] = field(default_factory=list)
    """Each client's control variate, or personal model, after each round."""


def copy(w: Params) -> Params:
    return {n: a.copy() for n, a in w.items()}


def examples(client: Client) -> int:
    return sum(len(y) for _, y in client)


def steps_of(
    w: Params, client: Client, steps: int, lr: float, force: Callable[[Params, Batch], Params]
) -> Params:
    """Take `steps` steps ``v -= lr force(v, batch)`` from `w`."""
    v = copy(w)
    for i in range(steps):
        f = force(v, client[i % len(client)])
        v = {n: v[n] - lr * f[n] for n in v}
    return v


def plain(v: Params, batch: Batch) -> Params:
    return gradient(v, *batch)


def moved(w: Params, client: Client, steps: int, lr: float) -> Params:
    """The update v_k - w of plain local steps."""
    v = steps_of(w, client, steps, lr, plain)
    return {n: v[n] - w[n] for n in w}


def used(turns: list[Turn]) -> list[Turn]:
    return [t for t in turns if t.fate == "used"]


def base_weights(turns: list[Turn], clients: list[Client], weighting: str) -> dict[int, float]:
    """p_k over the replies that are used."""
    n = {t.k: examples(clients[t.k]) if weighting == "num-examples" else 1 for t in used(turns)}
    total = sum(n.values())
    return {k: n_k / total for k, n_k in n.items()}


def mean_loss(w: Params, client: Client) -> float:
    """The mean over the client's examples, whatever the sizes of its batches."""
    return sum(len(y) * loss(w, x, y) for x, y in client) / examples(client)


def mean_gradient(w: Params, client: Client) -> Params:
    total = {n: np.zeros_like(a) for n, a in w.items()}
    for x, y in client:
        g = gradient(w, x, y)
        total = {n: total[n] + len(y) * g[n] for n in w}
    return {n: a / examples(client) for n, a in total.items()}


def mean_features(w: Params, client: Client) -> np.ndarray:
    total = sum(features(w, x).sum(axis=0) for x, _ in client)
    mean: np.ndarray = total / examples(client)
    return mean


def nova_weights(p: dict[int, float], a: dict[int, float]) -> dict[int, float]:
    """w_k = p_k (sum_j p_j a_j) / a_k."""
    effective = sum(p[k] * a[k] for k in p)
    return {k: p[k] * effective / a[k] for k in p}


def nova(
    w: Params, clients: list[Client], rounds: list[list[Turn]], lr: float, weighting: str
) -> Told:
    told = Told()
    for turns in rounds:
        p = base_weights(turns, clients, weighting)
        omega = nova_weights(p, {t.k: float(t.steps) for t in used(turns)})
        total = {n: np.zeros_like(a) for n, a in w.items()}
        for t in used(turns):
            delta = moved(w, clients[t.k], t.steps, lr)
            total = {n: total[n] + omega[t.k] * delta[n] for n in w}
        w = {n: w[n] + total[n] for n in w}
        told.models.append(w)
    return told


def squared_norm(delta: Params) -> float:
    return float(sum((d**2).sum() for d in delta.values()))
