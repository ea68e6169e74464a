"""SCAFFOLD. Karimireddy et al. 2020, Alg. 1."""

from collections.abc import Callable

import numpy as np

from tests.oracles.model import Client, Params, gradient


def scaffold(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    epochs: int = 1,
    local_steps: int | None = None,
    weighting: str = "uniform",
    cohorts: list[list[int]] | None = None,
    *,
    option: int = 2,
    server_lr: float = 1.0,
    steps_done: list[dict[int, int]] | None = None,
    unused: list[set[int]] | None = None,
    lost: list[set[int]] | None = None,
    controls: list[tuple[Params, list[Params]]] | None = None,
) -> list[Params]:
    """Return the global model after each round; the first eight arguments as in ``fedavg``.

    All of ``clients`` are the population N. For each round, ``steps_done`` has the clients whose step
    budget ends before their E steps, ``unused`` those whose reply the server drops, and ``lost`` those that
    have lost their c_k before it. ``controls`` is a list that takes c and all c_k after each round.
    """
    if weighting not in ("num-examples", "uniform"):
        raise ValueError(weighting)
    w_t = {name: value.copy() for name, value in w.items()}
    c = {name: np.zeros_like(value) for name, value in w.items()}  # c starts 0
    own = [{name: np.zeros_like(value) for name, value in w.items()} for _ in clients]  # c_k
    history = []
    for t in range(1, rounds + 1):
        eta = lr(t)
        cohort = list(range(len(clients))) if cohorts is None else cohorts[t - 1]
        for k in lost[t - 1] if lost else ():
            own[k] = {name: np.zeros_like(value) for name, value in w.items()}

        after = {}
        for k in cohort:
            batches = clients[k]
            planned = epochs * len(batches) if local_steps is None else local_steps
            steps = planned if steps_done is None else steps_done[t - 1].get(k, planned)  # K_k
            y = {name: value.copy() for name, value in w_t.items()}  # line 8
            for step in range(steps):  # line 9
                grad = gradient(y, *batches[step % len(batches)])  # line 10
                for name in y:  # line 11
                    y[name] = y[name] - eta * (grad[name] - own[k][name] + c[name])
            new = {}  # c_k+, line 13
            if option == 1:  # the gradient of the client's whole loss at w_t
                size = sum(len(labels) for _, labels in batches)
                new = {name: np.zeros_like(value) for name, value in w.items()}
                for x, labels in batches:
                    grad = gradient(w_t, x, labels)
                    for name in new:
                        new[name] = new[name] + grad[name] * len(labels) / size
            else:
                for name in y:
                    new[name] = own[k][name] - c[name] + (w_t[name] - y[name]) / (steps * eta)
            after[k] = y, new

        used = [k for k in cohort if not unused or k not in unused[t - 1]]
        if weighting == "num-examples":
            n = [sum(len(labels) for _, labels in clients[k]) for k in used]
            p = [n_k / sum(n) for n_k in n]
        else:
            p = [1.0 / len(used) for _ in used]
        step_made = {name: np.zeros_like(value) for name, value in w.items()}
        rise = {name: np.zeros_like(value) for name, value in w.items()}
        for i, k in enumerate(used):
            y, new = after[k]
            for name in w:
                step_made[name] = step_made[name] + p[i] * (y[name] - w_t[name])  # line 16
                rise[name] = rise[name] + (new[name] - own[k][name]) / len(clients)
            own[k] = new  # line 14
        w_t = {name: w_t[name] + server_lr * step_made[name] for name in w}  # line 17
        c = {name: c[name] + rise[name] for name in w}
        history.append(w_t)
        if controls is not None:
            controls.append((c, list(own)))
    return history
