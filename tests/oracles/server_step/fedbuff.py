"""FedBuff. Nguyen et al. 2022, Alg. 1, on a simulated clock.

``working`` clients train at a time. A client that is done hands in its update, and the next in order begins
at once, from the model as it then is; of those that end at one instant, all hand in first. After every K
updates the server takes ``w += eta_g (1/K) sum D_k / sqrt(1 + tau_k)``, tau_k the number of its steps
since client k was given w.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count, cycle
from typing import Any

from tests.oracles.model import Client, Params
from tests.oracles.rounds import minus, plus, rounds_of, zeros


def fedbuff(
    w: Params,
    clients: list[Client],
    server_steps: int,
    lr: Callable[[int], float],
    *plan: Any,
    buffer: int,
    working: int,
    seconds: Callable[[int, int], float],
    order: list[int] | None = None,
    server_lr: float = 1.0,
    staleness: list[list[int]] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each step of the server.

    ``seconds(k, turn)`` is how long client k's turn takes, counted over all clients from 0; of two that end
    together, the one that began first is first. ``order`` is the sequence of clients, repeated (None:
    0 to N - 1); one that is still at work is passed over. ``lr(t)`` is that of a client that begins before
    the server's step t, from 1. ``plan`` and ``how`` are as for :func:`rounds_of`.
    ``staleness`` is a list that takes the tau_k of each of the server's steps.
    """
    at_work: list[tuple[float, int, int, int, Params]] = []  # (end, turn, client, its version, D_k)
    queue, turns = cycle(order or range(len(clients))), count()
    models: list[Params] = []
    busy: set[int] = set()

    def begin(time: float) -> None:
        k = next(j for j in queue if j not in busy)
        busy.add(k)
        turn, version = next(turns), len(models)
        (r,) = rounds_of(clients, 1, lambda _: lr(version + 1), *plan, cohorts=[[k]], **how)
        delta = minus(r.descend(k, w), w)
        heappush(at_work, (time + seconds(k, turn), turn, k, version, delta))

    time, free = 0.0, working
    while len(models) < server_steps:
        total, stale = zeros(w), []
        while len(stale) < buffer:
            if not at_work or at_work[0][0] > time:
                for _ in range(free):
                    begin(time)
                free = 0
            time, _, k, version, delta = heappop(at_work)
            busy.discard(k)
            free += 1
            stale.append(len(models) - version)
            total = plus(total, (1 + stale[-1]) ** -0.5 / buffer, delta)
        w = plus(w, server_lr, total)
        models.append(w)
        if staleness is not None:
            staleness.append(stale)
    return models
