"""What the oracles share: who takes part in a round, a client's batches, sums of arrays by name.

An oracle is called ``method(w, clients, rounds, lr, ...)``: what follows the first model ``w``, and every
setting that the oracle does not name itself, are the arguments of :func:`rounds_of`. It returns the global
model after each round.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles.model import Batch, Client, Params, gradient

Slope = Callable[[Params, np.ndarray, np.ndarray], Params]
"""The gradient of the mean loss of a batch, at given parameters."""


def zeros(w: Params) -> Params:
    """Return zeros in the shapes of ``w``."""
    return {name: np.zeros_like(value) for name, value in w.items()}


def plus(a: Params, factor: float, b: Params) -> Params:
    """Return a + factor b; an entry that b lacks stays."""
    return {name: a[name] + factor * b[name] if name in b else a[name] for name in a}


def minus(a: Params, b: Params) -> Params:
    """Return a - b."""
    return {name: a[name] - b[name] for name in a}


def square(a: Params) -> float:
    """Return |a|^2, all arrays as one vector."""
    return float(sum((value**2).sum() for value in a.values()))


def examples(client: Client) -> int:
    """Return n_k, the number of a client's examples."""
    return sum(len(y) for _, y in client)


def mean_gradient(w: Params, client: Client, slope: Slope = gradient) -> Params:
    """Return the gradient of the mean loss over all the client's examples, not over its batches."""
    total = zeros(w)
    for x, y in client:
        total = plus(total, len(y) / examples(client), slope(w, x, y))
    return total


@dataclass
class Round:
    """One round: ``t`` (from 1), ``eta``, and the clients that take part.

    ``cohort`` are the clients asked; ``planned`` has their E steps, ``steps`` the s_k that they take.
    ``trained`` are those with s_k > 0, and ``used`` those of them whose reply the server uses. ``p`` are
    their weights, of sum 1. ``lost`` are the clients that have lost what they kept before this round.
    """

    t: int
    eta: float
    clients: list[Client]
    slope: Slope
    cohort: list[int]
    planned: dict[int, int]
    steps: dict[int, int]
    trained: list[int]
    used: list[int]
    p: dict[int, float]
    lost: set[int]

    def batches(self, k: int) -> list[Batch]:
        """Return the batch of each of client k's steps: its own in order, and around."""
        return [self.clients[k][step % len(self.clients[k])] for step in range(self.steps[k])]

    def descend(self, k: int, v: Params, slope: Slope | None = None) -> Params:
        """Return v after a step ``v -= eta slope(v)`` (default: grad f_k) on each of client k's batches."""
        slope = self.slope if slope is None else slope
        for x, y in self.batches(k):
            v = plus(v, -self.eta, slope(v, x, y))
        return v

    def forget(self, *kept: dict[int, Any]) -> None:
        """Take out what clients have lost."""
        for k in self.lost:
            for own in kept:
                own.pop(k, None)

    def mean(self, parts: Mapping[int, Params]) -> Params:
        """Return sum_k p_k parts_k over the clients that are used."""
        total = zeros(parts[self.used[0]])
        for k in self.used:
            total = plus(total, self.p[k], parts[k])
        return total


def weights_of(clients: list[Client], used: list[int], weighting: str) -> dict[int, float]:
    """Return p_k, normalised over the clients of ``used``."""
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    n = {k: float(examples(clients[k])) if weighting == "num-examples" else 1.0 for k in used}
    return {k: n_k / sum(n.values()) for k, n_k in n.items()}


def rounds_of(
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "num-examples",
    cohorts: list[list[int]] | None = None,
    *,
    steps_done: list[dict[int, int]] | None = None,
    unused: list[set[int]] | None = None,
    lost: list[set[int]] | None = None,
    slope: Slope = gradient,
    **ignored: Any,
) -> Iterator[Round]:
    """Return the rounds of a run.

    A client plans ``epochs`` passes over its batches in order, or ``local_steps`` steps. ``lr(t)`` is the
    learning rate of round t (from 1). For each round, ``cohorts`` has the clients that take part (None:
    all), ``steps_done`` the steps of those clients that do not take all they planned, ``unused`` the
    clients whose reply the server drops, ``lost`` those that have lost what they kept before it. ``slope``
    is the gradient of a batch's mean loss. Of the rest, ``gradient`` is what `check_method` gives.
    """
    assert set(ignored) <= {"gradient"}, ignored
    for t in range(1, rounds + 1):
        cohort = list(range(len(clients))) if cohorts is None else cohorts[t - 1]
        planned, steps = {}, {}
        for k in cohort:
            planned[k] = epochs * len(clients[k]) if local_steps is None else local_steps
            steps[k] = planned[k] if steps_done is None else steps_done[t - 1].get(k, planned[k])
            assert 0 <= steps[k] <= planned[k], (t, k)
        dropped = unused[t - 1] if unused else set()
        trained = [k for k in cohort if steps[k] > 0]
        used = [k for k in trained if k not in dropped]
        p, gone = weights_of(clients, used, weighting), lost[t - 1] if lost else set()
        yield Round(t, lr(t), clients, slope, cohort, planned, steps, trained, used, p, gone)
