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
``- a^2 eta grad f(mixed) - (1 - a) eta grad f(v)``.

**How often a is learnt.** With every batch, or with the first one of a round alone, as in the authors'
code; the paper's text speaks of every communication round.
"""

from typing import Any

from tests.oracles.model import Params
from tests.oracles.rounds import minus, plus, rounds_of


def mixed(u: Params, v: Params, a: float) -> Params:
    """Return ``a u + (1 - a) v``; a client evaluates this, with the global model for v."""
    return {name: a * u[name] + (1.0 - a) * v[name] for name in v}


def apfl(
    w: Params,
    *run: Any,
    alpha: float,
    learn: bool = True,
    every: str = "step",
    personal: list[dict[int, tuple[Params, float]]] | None = None,
    **how: Any,
) -> list[Params]:
    """Return the global model after each round.

    The global model is FedAvg's, of the v. u_k starts at the w_t of the client's first round, a at
    ``alpha``; so do they after they were lost. Both are kept whether or not the server used the reply.
    ``learn=False`` keeps a fixed. ``personal`` is a list that takes (u_k, a_k) of all clients after each
    round.
    """
    own: dict[int, tuple[Params, float]] = {}
    models = []
    for r in rounds_of(*run, **how):
        r.forget(own)
        ends = {}
        for k in r.trained:
            v = w
            u, a = own.get(k, (w, alpha))
            for step, (x, y) in enumerate(r.batches(k)):
                at_v, at_mixed = r.slope(v, x, y), r.slope(mixed(u, v, a), x, y)
                rise = sum(float((d * at_mixed[n]).sum()) for n, d in minus(u, v).items())
                v = plus(v, -r.eta, at_v)
                u = plus(u, -r.eta * a, at_mixed)
                if learn and (every == "step" or step == 0):  # <u - v, grad f(mixed)>
                    a = min(max(a - r.eta * rise, 0.0), 1.0)
            own[k], ends[k] = (u, a), v
        w = r.mean(ends)
        models.append(w)
        if personal is not None:
            personal.append(dict(own))
    return models
