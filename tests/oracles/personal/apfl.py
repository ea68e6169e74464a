"""APFL. Deng, Kamani, Mahdavi 2020, "Adaptive personalized federated learning".

Alg. 1 ("Local Descent APFL"), with v for the copy of the global model, u for the client's own, and
``mixed = a u + (1 - a) v``. On one batch, a local step is::

    v' = v - eta grad f(v)
    u' = u - eta grad_u f(a u + (1 - a) v)
    mixed' = a u' + (1 - a) v'

**Order.** The paper's line for u takes the gradient at the mixed model of the step before, so of the old u
and the old v. The update of a ("Adaptive alpha update"), ``a - eta <u - v, grad f(mixed)>``, has the old
u, v and mixed too. So all three are taken at once from the old values; the new a is first in use in the
next step. It is clipped to [0, 1], where the paper seeks it.

**The factor a.** The local objective is ``min_u f(a u + (1 - a) v)``, and Alg. 1's gradient is with respect
to u: by the chain rule ``a grad f(mixed)``. The paper's analysis has it so: there the mixed model moves by
``- a^2 eta grad f(mixed) - (1 - a) eta grad f(v)``. ``chain=False`` leaves the factor out.

**How often a is learnt.** The paper's text speaks of every communication
round: ``every="step"``, with every batch, or ``"round"``, with the first batch of a round alone.
"""

from collections.abc import Callable
from typing import Any

from tests.oracles.averaged import Turn, averaged
from tests.oracles.model import Client, Params, gradient


def mixed(u: Params, v: Params, a: float) -> Params:
    """Return ``a u + (1 - a) v``; a client evaluates this, with the global model for v."""
    return {name: a * u[name] + (1.0 - a) * v[name] for name in v}


def apfl(
    w: Params,
    clients: list[Client],
    rounds: int,
    lr: Callable[[int], float],
    *args: Any,
    alpha: float,
    learn: bool = True,
    chain: bool = True,
    every: str = "step",
    personal: list[dict[int, tuple[Params, float]]] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round; the other arguments as in ``rounds.averaged``.

    The global model is FedAvg's, of the v. u_k starts at the w_t of the client's first round, a at
    ``alpha``; so do they after they were lost. Both are kept whether or not the server used the reply.
    ``learn=False`` keeps a fixed. ``personal`` is a list that takes (u_k, a_k) of all clients after each
    round.
    """
    if every not in ("step", "round"):
        raise ValueError(every)
    own: dict[int, tuple[Params, float]] = {}

    def local(turn: Turn) -> Params:
        eta = turn.eta
        v = {name: value.copy() for name, value in turn.w.items()}
        u, a = own.get(turn.k, (v, alpha))
        for step, (x, y) in enumerate(turn.batches):
            at_v, at_mixed = gradient(v, x, y), gradient(mixed(u, v, a), x, y)
            slope = 0.0  # <u - v, grad f(mixed)>
            for name in v:
                slope += float(((u[name] - v[name]) * at_mixed[name]).sum())
            factor = a if chain else 1.0
            v = {name: v[name] - eta * at_v[name] for name in v}
            u = {name: u[name] - eta * factor * at_mixed[name] for name in v}
            if learn and (every == "step" or step == 0):
                a = min(max(a - eta * slope, 0.0), 1.0)
        own[turn.k] = u, a
        return v

    def after(_w: Params, _used: dict[int, Params]) -> None:
        if personal is not None:
            personal.append(dict(own))

    return averaged(
        local, w, clients, rounds, lr, *args,
        forget=lambda k: own.pop(k, None), after=after, **how,
    )  # fmt: skip
