"""FedAvg, FedProx and SCAFFOLD as plain loops in float64, and with the behaviours of `behaviours.py`.

Sources: McMahan et al. 2017, Algorithm 1 (FedAvg); Li et al. 2020, Algorithm 2 (FedProx); Karimireddy et
al. 2020, Algorithm 1 (SCAFFOLD). ``tests/benchmarks/conformity`` compares them with the oracles of the
package's own tests, which share no code with them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from .behaviours import BEHAVIOURS
from .model import BUFFERS, Batch, Params, gradient


@dataclass(frozen=True)
class Task:
    """What is trained, and how: the same for every implementation.

    A client passes `epochs` times over its data in order, in batches of `batch_size`, the last of an epoch
    smaller if need be, with plain SGD of learning rate `lr`. ``cohorts[t]`` are the clients of round t,
    from 0; all of `clients` are SCAFFOLD's N.
    """

    parameters: Params
    clients: tuple[Batch, ...]
    cohorts: tuple[tuple[int, ...], ...]
    lr: float
    epochs: int
    batch_size: int
    mu: float = 0.0
    momentum: float = 0.0


@dataclass
class Trace:
    """What a run did: the global model after each round, and where clients took their gradients.

    ``points[t, k][s]`` are client k's parameters before its step s of round t, all from 0.
    """

    models: list[Params] = field(default_factory=list)
    points: dict[tuple[int, int], list[Params]] = field(default_factory=dict)


def federate(
    task: Task, method: str, behaviours: Collection[str] = (), points: bool = True
) -> Trace:
    """Run a method of `METHODS` on a task, with some behaviours, and return what it did."""
    trace = Trace()
    for t, (model, visited) in enumerate(rounds(task, method, behaviours)):
        trace.models.append(model)
        if points:
            trace.points |= {(t, k): where for k, where in visited.items()}
    return trace


def rounds(
    task: Task, method: str, behaviours: Collection[str] = ()
) -> Iterator[tuple[Params, dict[int, list[Params]]]]:
    """Yield, round by round, the new model and each client's points; as :func:`federate` keeps them."""
    if unknown := [b for b in behaviours if method not in BEHAVIOURS[b].methods]:
        raise ValueError(f"{method} cannot have the behaviours {unknown}")
    run = _Run(task, method, frozenset(behaviours))
    for cohort in task.cohorts:
        visited: dict[int, list[Params]] = {k: [] for k in cohort}
        run.server(cohort, {k: run.client(k, visited[k]) for k in cohort})
        yield dict(run.w), visited


class _Run:
    """A run's state: the model, and SCAFFOLD's control variates."""

    def __init__(self, task: Task, method: str, behaviours: frozenset[str]) -> None:
        self.task, self.method, self.has = task, method, behaviours
        self.scaffold = method.startswith("SCAFFOLD")
        self.w = {name: np.array(a, np.float64) for name, a in task.parameters.items()}
        self.trained = [name for name in self.w if name not in BUFFERS]
        self.zero = {name: np.zeros_like(self.w[name]) for name in self.trained}
        self.c = self._begin()
        self.own: dict[int, Params] = {}

    def _begin(self) -> Params:
        """Return a control variate that nobody has used yet."""
        if "from-weights" in self.has:
            return {name: self.w[name].copy() for name in self.trained}
        return dict(self.zero)

    def client(self, k: int, visited: list[Params]) -> tuple[Params, Params]:
        """Train client k, and return its parameters and, for SCAFFOLD, its new control variate."""
        task, lr = self.task, self.task.lr
        v, velocity = dict(self.w), dict(self.zero)
        own = self._own(k)
        steps = 0
        for batch in self._batches(k):
            visited.append({name: v[name] for name in self.trained})
            grad, buffers = gradient(v, batch)
            change = self._correction(v, own)
            outside = "outside-momentum" in self.has
            for name in self.trained:
                g = grad[name] if outside else grad[name] + change[name]
                velocity[name] = task.momentum * velocity[name] + g
                v[name] = v[name] - lr * velocity[name]
                if outside:
                    v[name] = v[name] - lr * change[name]
            v |= buffers
            steps += 1
        return v, self._variate(k, v, own, steps) if self.scaffold else {}

    def _own(self, k: int) -> Params:
        """Return the control variate that client k begins the round with."""
        if not self.scaffold:
            return self.zero
        if k not in self.own:
            self.own[k] = self._begin()
        elif "new-at-once" in self.has:
            self.own[k] = self._variate(k, self.w, self.own[k], 0)
        return self.own[k]

    def _batches(self, k: int) -> Iterator[Batch]:
        x, y = self.task.clients[k]
        size, epochs, n = self.task.batch_size, self.task.epochs, len(y)
        if "run-on" in self.has:
            order = np.arange(math.ceil(epochs * n / size) * size) % n
            indices = list(order.reshape(-1, size))
        else:
            end = n - n % size if "drop-last" in self.has else n
            one = [np.arange(i, min(i + size, end)) for i in range(0, end, size)]
            indices = one * epochs
        if "one-batch" in self.has:
            indices = indices[:epochs]
        for i in indices:
            yield x[i], y[i]

    def _correction(self, v: Params, own: Params) -> Params:
        """Return what the method adds to a step's gradient."""
        if self.scaffold:  # c - c_k, Algorithm 1, line 10
            return {name: self.c[name] - own[name] for name in self.trained}
        if self.method == "FedAvg" or "no-penalty" in self.has:
            return self.zero
        apart = {name: v[name] - self.w[name] for name in self.trained}
        if "norm" in self.has:  # the gradient of mu/2 sum of norms; 0 where a norm is 0
            length = {name: float(np.sqrt((a**2).sum())) or 1.0 for name, a in apart.items()}
            return {name: self.task.mu / 2 * a / length[name] for name, a in apart.items()}
        mu = self.task.mu * (2 if "twice-mu" in self.has else 1)
        return {name: mu * a for name, a in apart.items()}  # of mu/2 |v - w|^2

    def _variate(self, k: int, v: Params, own: Params, steps: int) -> Params:
        """Return c_k+, Algorithm 1, line 12."""
        sign = -1.0 if "wrong-sign" in self.has else 1.0
        if self.method == "SCAFFOLD-1":
            grad, _ = gradient(self.w, self.task.clients[k])
            return {name: sign * grad[name] for name in self.trained}
        if "one-epoch-steps" in self.has:
            steps = math.ceil(steps / self.task.epochs)
        scale = sign / (max(steps, 1) * self.task.lr)
        return {n: own[n] - self.c[n] + scale * (self.w[n] - v[n]) for n in self.trained}

    def server(self, cohort: tuple[int, ...], after: dict[int, tuple[Params, Params]]) -> None:
        """Take the clients' models and control variates."""
        examples = [len(self.task.clients[k][1]) for k in cohort]
        weigh = "by-examples" in self.has if self.scaffold else "uniform" not in self.has
        p = [n / sum(examples) if weigh else 1 / len(cohort) for n in examples]
        w = {
            name: np.sum([p[i] * after[k][0][name] for i, k in enumerate(cohort)], axis=0)
            for name in self.w
        }
        if "own-buffers" in self.has:
            w |= {name: after[cohort[0]][0][name] for name in BUFFERS}
        if self.scaffold:
            share = 1.0 if "c-of-cohort" in self.has else len(cohort) / len(self.task.clients)
            rise = {
                name: sum(
                    p[i] * (after[k][1][name] - self.own[k][name]) for i, k in enumerate(cohort)
                )
                for name in self.trained
            }
            self.c = {name: self.c[name] + share * rise[name] for name in self.trained}
            self.own |= {k: after[k][1] for k in cohort}
        self.w = w
