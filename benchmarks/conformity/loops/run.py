"""A run of FedAvg on a task, in float64: what the loops of all methods change.

Source: McMahan et al. 2017, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..model import BUFFERS, Batch, Params, gradient


@dataclass(frozen=True)
class Task:
    """What is trained, and how: the same for every implementation.

    A client passes `epochs` times over its data in order, in batches of `batch_size`, the last of an epoch
    smaller if need be, with plain SGD of learning rate `lr`, times `lr_decay` after each round.
    ``cohorts[t]`` are the clients of round t, from 0; all of `clients` are the population N. `settings` are
    the methods' own.
    """

    parameters: Params
    clients: tuple[Batch, ...]
    cohorts: tuple[tuple[int, ...], ...]
    lr: float
    epochs: int
    batch_size: int
    mu: float = 0.0
    momentum: float = 0.0
    lr_decay: float = 1.0
    settings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass
class Trace:
    """What a run did: the model after each round, and where clients took their gradients.

    ``points[t, k][s]`` are client k's parameters before its step s of round t, all from 0.
    """

    models: list[Params] = field(default_factory=list)
    points: dict[tuple[int, int], list[Params]] = field(default_factory=dict)


class Run:
    """FedAvg. A method overrides what it changes; `has` are the run's behaviours."""

    weighting = "examples"

    def __init__(self, task: Task, method: str, behaviours: frozenset[str] = frozenset()) -> None:
        self.task, self.method, self.has = task, method, behaviours
        self.settings = task.settings.get(method, {})
        self.first = {name: np.array(a, np.float64) for name, a in task.parameters.items()}
        self.w = dict(self.first)
        self.trained = [name for name in self.w if name not in BUFFERS]
        self.zero = {name: np.zeros_like(self.w[name]) for name in self.trained}
        self.round, self.lr = 0, task.lr

    def next_round(self, cohort: tuple[int, ...]) -> tuple[Params, dict[int, list[Params]]]:
        """Train a round, and return what is compared: the model, and each client's points."""
        visited: dict[int, list[Params]] = {k: [] for k in cohort}
        self.server(cohort, {k: self.client(k, visited[k]) for k in cohort})
        self.round += 1
        self.lr *= self.task.lr_decay
        return self.result(), visited

    def result(self) -> Params:
        """Return what is compared after a round: the global model."""
        return dict(self.w)

    def client(self, k: int, visited: list[Params]) -> Params:
        """Train client k, and return its model."""
        v, velocity = self.start(k), dict(self.zero)
        for batch in self.batches(k):
            visited.append({name: v[name] for name in self.trained})
            grad, buffers = self.gradient(k, v, batch)
            for name in self.trained:
                velocity[name] = self.task.momentum * velocity[name] + grad[name]
                v[name] = v[name] - self.lr * velocity[name]
            v |= buffers
        return v

    def start(self, k: int) -> Params:
        """Return where client k begins a round."""
        return dict(self.w)

    def slope(self, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the batch's gradient at v, and BatchNorm's buffers after it."""
        return gradient(v, batch)

    def gradient(self, k: int, v: Params, batch: Batch) -> tuple[Params, Params]:
        """Return the direction of a step from v, and BatchNorm's buffers after it."""
        return self.slope(v, batch)

    def batches(self, k: int) -> Iterator[Batch]:
        """Yield the batch of each of client k's steps."""
        x, y = self.task.clients[k]
        for i in self.indices(len(y)):
            yield x[i], y[i]

    def indices(self, n: int) -> list[np.ndarray]:
        """Return the examples of each step of a client of n examples."""
        size, epochs = self.task.batch_size, self.task.epochs
        if "run-on" in self.has:
            order = np.arange(math.ceil(epochs * n / size) * size) % n
            indices = list(order.reshape(-1, size))
        else:
            end = n - n % size if "drop-last" in self.has else n
            indices = [np.arange(i, min(i + size, end)) for i in range(0, end, size)] * epochs
        return indices[:epochs] if "one-batch" in self.has else indices

    def server(self, cohort: tuple[int, ...], ends: dict[int, Params]) -> None:
        """Take the clients' models."""
        self.w = self.mean(cohort, ends)

    def weights(self, cohort: tuple[int, ...]) -> dict[int, float]:
        """Return the weights of a mean over the cohort."""
        weighting = self.weighting
        if self.has & {"uniform", "by-examples"}:
            weighting = "uniform" if "uniform" in self.has else "examples"
        n = {k: len(self.task.clients[k][1]) if weighting == "examples" else 1 for k in cohort}
        return {k: n_k / sum(n.values()) for k, n_k in n.items()}

    def mean(self, cohort: tuple[int, ...], parts: Mapping[int, Params]) -> Params:
        """Return the weighted mean of what the cohort's clients have."""
        p = self.weights(cohort)
        return {
            name: np.sum([p[k] * parts[k][name] for k in cohort], axis=0)
            for name in parts[cohort[0]]
        }
