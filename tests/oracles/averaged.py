"""FedAvg's rounds around another client, for oracles whose server is FedAvg's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.oracles.model import Batch, Client, Params
from tests.oracles.model import gradient as cross_entropy_gradient


@dataclass(frozen=True)
class Turn:
    """One client's part in one round."""

    t: int
    """The round, from 1."""
    k: int
    w: Params
    """The global model w_t."""
    data: Client
    """All of the client's batches."""
    batches: list[Batch]
    """The batch of each of its steps."""
    eta: float


def averaged(
    local: Callable[[Turn], Params],
    w: Params,
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
    forget: Callable[[int], Any] = lambda k: None,
    after: Callable[[Params, dict[int, Params]], Any] = lambda w, used: None,
    gradient: Any = None,
) -> list[Params]:
    """Return the global model after each round; the first arguments after ``local`` as in ``fedavg``.

    ``local(turn)`` returns v_k. For each round, ``steps_done`` has the clients whose step budget ends
    before their E steps, ``unused`` those whose reply the server drops, and ``lost`` those that have lost
    their state before it: ``forget(k)``. ``after(w, v)`` is told of each round's new model and the v_k
    used. ``gradient`` is what `check_method` gives; the oracles have their own.
    """
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    w_t = {name: value.copy() for name, value in w.items()}
    history = []
    for t in range(1, rounds + 1):
        for k in lost[t - 1] if lost else ():
            forget(k)
        v = {}
        for k in range(len(clients)) if cohorts is None else cohorts[t - 1]:
            steps = epochs * len(clients[k]) if local_steps is None else local_steps
            if steps_done is not None:
                steps = steps_done[t - 1].get(k, steps)
            batches = [clients[k][step % len(clients[k])] for step in range(steps)]
            v[k] = local(Turn(t, k, w_t, clients[k], batches, lr(t)))

        used = {k: v[k] for k in v if not unused or k not in unused[t - 1]}
        p = dict.fromkeys(used, 1.0)
        if weighting == "num-examples":
            p = {k: float(sum(len(y) for _, y in clients[k])) for k in used}
        total = sum(p.values())
        new = {name: value.copy() for name, value in w_t.items()}
        for k in used:  # w <- w + sum_k p_k (v_k - w)
            for name in new:
                new[name] = new[name] + p[k] / total * (used[k][name] - w_t[name])
        w_t = new
        history.append(w_t)
        after(w_t, used)
    return history


def sgd(
    start: Params,
    batches: list[Batch],
    eta: float,
    more: Callable[[Params, Batch], Params] = lambda v, batch: {},
    slope: Callable[..., Params] = cross_entropy_gradient,
) -> Params:
    """Return ``start`` after a step ``v -= eta (slope(v, x, y) + more(v, (x, y)))`` on each batch.

    ``more`` leaves out what it does not change.
    """
    v = {name: value.copy() for name, value in start.items()}
    for x, y in batches:
        g = slope(v, x, y)
        extra = more(v, (x, y))
        g = {name: g[name] + extra[name] if name in extra else g[name] for name in v}
        v = {name: v[name] - eta * g[name] for name in v}
    return v
