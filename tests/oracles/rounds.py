"""What the comparators' oracles share: who takes part in a round, and sums of arrays by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tests.oracles.model import Client, Params

Slope = Callable[[Params, np.ndarray, np.ndarray], Params]
"""The gradient of the mean loss of a batch, at given parameters; ``model.gradient`` by default."""


def zeros(w: Params) -> Params:
    """Return zeros in the shapes of ``w``."""
    return {name: np.zeros_like(value) for name, value in w.items()}


def plus(a: Params, factor: float, b: Params) -> Params:
    """Return a + factor b."""
    return {name: a[name] + factor * b[name] for name in a}


def minus(a: Params, b: Params) -> Params:
    """Return a - b."""
    return {name: a[name] - b[name] for name in a}


def weighted(parts: Mapping[int, Params], weights: Mapping[int, float]) -> Params:
    """Return sum_k weights_k parts_k; at least one part."""
    total = zeros(next(iter(parts.values())))
    for k, part in parts.items():
        total = plus(total, weights[k], part)
    return total


def square(a: Params) -> float:
    """Return |a|^2, all arrays as one vector."""
    total = 0.0
    for value in a.values():
        for x in value.ravel():
            total += float(x) ** 2
    return total


def examples(client: Client) -> int:
    """Return n_k, the number of a client's examples."""
    return sum(len(y) for _, y in client)


def mean_gradient(w: Params, client: Client, slope: Slope) -> Params:
    """Return the gradient of the mean loss over all the client's examples, not over its batches."""
    total = zeros(w)
    for x, y in client:
        total = plus(total, len(y) / examples(client), slope(w, x, y))
    return total


@dataclass
class Round:
    """One round: ``t`` (from 1), ``eta``, and the clients that take part.

    ``cohort`` are the clients asked; ``planned`` has their E steps, ``steps`` the s_k that they take.
    ``used`` are those whose reply the server uses: not one with s_k = 0, which is inactive. ``p`` are their
    weights, of sum 1. ``lost`` are the clients that have lost what they kept before this round.
    """

    t: int
    eta: float
    cohort: list[int]
    planned: dict[int, int]
    steps: dict[int, int]
    used: list[int]
    p: dict[int, float]
    lost: set[int]


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
    epochs: int,
    local_steps: int | None,
    weighting: str,
    cohorts: list[list[int]] | None,
    steps_done: list[dict[int, int]] | None,
    unused: list[set[int]] | None = None,
    lost: list[set[int]] | None = None,
) -> Iterator[Round]:
    """Return the rounds of a run.

    A client plans ``epochs`` passes over its batches, or ``local_steps`` steps. For each round,
    ``cohorts`` has the clients that take part (None: all), ``steps_done`` the steps of those clients
    that do not take all they planned, ``unused`` the clients whose reply the server drops.
    """
    for t in range(1, rounds + 1):
        cohort = list(range(len(clients))) if cohorts is None else cohorts[t - 1]
        planned, steps = {}, {}
        for k in cohort:
            planned[k] = epochs * len(clients[k]) if local_steps is None else local_steps
            steps[k] = planned[k] if steps_done is None else steps_done[t - 1].get(k, planned[k])
            if not 0 <= steps[k] <= planned[k]:
                raise ValueError(f"round {t}, client {k}: {steps[k]} of {planned[k]} steps")
        dropped = unused[t - 1] if unused else set()
        used = [k for k in cohort if steps[k] > 0 and k not in dropped]
        if not used:
            raise ValueError(f"round {t}: no reply is used")
        gone = lost[t - 1] if lost else set()
        p = weights_of(clients, used, weighting)
        yield Round(t, lr(t), cohort, planned, steps, used, p, gone)


def descend(
    start: Params, client: Client, steps: int, eta: float, force: Callable[..., Params]
) -> Params:
    """Return v after ``steps`` steps ``v -= eta force(v, x, y)``, around the client's batches in order."""
    v = start
    for step in range(steps):
        x, y = client[step % len(client)]
        v = plus(v, -eta, force(v, x, y))
    return v
