"""Laws of a whole run: what the global model is after each round."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np

from flwr_regs.abilities import Recovers
from flwr_regs.flower.grids.in_process import InProcessGrid
from flwr_regs.methods.server_step.fedavg import FedAvg, FedAvgClient
from flwr_regs.term import Arrays, ClientContext, ServerContext, Slot, Term
from flwr_regs.testing import problem
from flwr_regs.testing.method import LawBroken, Method, Skipped, agree, by_round, law
from flwr_regs.testing.problem import make_clients, train

EPOCHS, STEPS = {"local-epochs": 2}, {"local-steps": 7}


@cache
def fedavg_run(weighting: str) -> list[problem.NDArrays]:
    """Return FedAvg's models."""
    return train(FedAvg(seed=3, weighting=weighting), FedAvgClient)


@lru_cache(maxsize=4)
def usual_run(method: Method) -> list[problem.NDArrays]:
    """Return the method's models, with which several laws compare others."""
    return train(method.build(seed=3), method.make_client)


@law("neutral hyper-parameters give FedAvg")
def neutral(method: Method) -> None:
    """To the bit if `neutral_is_exact`, else to 1e-6."""
    if method.neutral is None:
        raise Skipped("no neutral settings are given")
    strategy = method.build_neutral(seed=3)
    actual = train(strategy, method.make_client)
    by_round(actual, fedavg_run(strategy.weighting), 0.0 if method.neutral_is_exact else 1e-6)


@law("other hyper-parameters move the weights, in both directions")
def moves(method: Method) -> None:
    """By more than 1e-3 after four rounds."""
    plain, actual = fedavg_run(method.build().weighting)[-1], usual_run(method)[-1]
    apart = np.concatenate([np.ravel(actual[n] - plain[n]) for n in plain])
    if not (apart.max() > 1e-3 and apart.min() < -1e-3):
        raise LawBroken(
            "expected differences from FedAvg's model above 1e-3 and below -1e-3, found "
            f"{apart.min():.3g} to {apart.max():.3g}"
        )


@law(
    "a whole run equals the oracle",
    {
        "num-examples, epochs": {"weighting": "num-examples", "length": EPOCHS},
        "uniform, steps": {"weighting": "uniform", "length": STEPS},
        "some clients": {"length": EPOCHS, "share": 0.6},
    },
)
def oracle(
    method: Method,
    length: Mapping[str, int],
    weighting: str | None = None,
    share: float = 1.0,
) -> None:
    """Clients of unequal size and a learning rate that falls, in float64; after every round.

    With the `weighting`s, both ways to say how long a client trains, and a `share` of the clients.
    """
    if method.oracle is None:
        raise Skipped("no oracle is given")
    clients = make_clients(4 if share == 1.0 else 5)

    def falling(t: int) -> float:
        return float(0.8 ** (t - 1))

    options = {} if weighting is None else {"weighting": weighting}
    strategy = method.build(
        **options, seed=11, lr_schedule=falling, fraction_train=share, min_train_nodes=1
    )
    actual = train(strategy, method.make_client, rounds=5, clients=clients, length=length)
    cohorts = [entry["cohort"] for entry in strategy.history]
    arguments = {
        "epochs": length.get("local-epochs", 1),
        "local_steps": length.get("local-steps"),
        "weighting": strategy.weighting,
        "cohorts": None if share == 1.0 else cohorts,
        "gradient": problem.gradient,
    }
    known = inspect.signature(method.oracle).parameters
    variadic = any(p.kind is p.VAR_KEYWORD for p in known.values())
    taken = {n: v for n, v in arguments.items() if n in known or variadic}
    asked = {"epochs" if "local-epochs" in length else "local_steps"} | (
        {"cohorts"} if share < 1 else set()
    )
    if missing := sorted(asked - taken.keys()):
        raise Skipped(f"the oracle takes no {', '.join(missing)}")
    expected = method.oracle(
        problem.start_weights(),
        problem.to_numpy(clients),
        5,
        lambda t: 0.2 * falling(t),
        **taken,
        **method.oracle_settings,
    )
    by_round(actual, expected, method.tolerance)


@law("messages and client state survive Flower's serialisation to the bit")
def state(method: Method) -> None:
    """Every message and every Context.state goes through bytes."""
    by_round(on(problem.SerialisingGrid, method), usual_run(method), 0.0)


@law("a round that the server repeats is trained to the same bits")
def repeated(method: Method) -> None:
    """Each client trains each round twice; both times it begins with the same state."""
    by_round(on(problem.RepeatingGrid, method), usual_run(method), 0.0)


def on(grid: type[InProcessGrid], method: Method) -> list[problem.NDArrays]:
    """Return the models of the usual run on another grid."""
    data = make_clients()
    app = problem.app_of(method.make_client, data)
    return train(method.build(seed=3), method.make_client, grid=grid(app, len(data)))


@law("both downlinks train to the same model")
def downlinks(method: Method) -> None:
    """What clients recover from the last step gives the bits of what is sent."""
    if not any(isinstance(t, Recovers) for t in method.terms):
        raise Skipped("no term recovers its broadcast from the last step")
    actual, expected = (
        train(method.build(seed=3, downlink=kind), method.make_client)
        for kind in ("delta", "model")
    )
    by_round(actual, expected, 0.0)


@law(
    "neither the order of the replies nor which client is which matters",
    {"replies": {"what": "replies"}, "clients": {"what": "clients"}},
)
def order(method: Method, what: str) -> None:
    """Replies that arrive last first change no bit; clients in the reverse order change 1e-12 at most."""
    if what == "replies":
        by_round(on(problem.ReversingGrid, method), usual_run(method), 0.0)
        return
    backwards = make_clients()[::-1]
    actual = train(method.build(seed=3), method.make_client, clients=backwards)
    by_round(actual, usual_run(method), 1e-12)


@dataclass(frozen=True)
class Nothing(Term):
    """A term with hooks on both sides that does nothing."""

    name: ClassVar[str] = "nothing"
    keeps_delta: ClassVar[bool] = True

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        return base

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return grads

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        return server, delta


@law(
    "chaining a term that does nothing changes no bit",
    {"first": {"first": True}, "last": {"first": False}},
)
def identity(method: Method, first: bool) -> None:
    """First, or last (but ahead of a term that compresses)."""
    actual = train(*method.beside(Nothing(), first=first, seed=3))
    by_round(actual, usual_run(method), 0.0)


@law("two quadratic clients settle where the theory says")
def fixed_point(method: Method) -> None:
    """Within 1e-6 after 120 rounds, from v = 0; and the strategy saw no sign of divergence on the way."""
    if method.fixed_point is None:
        raise Skipped("no fixed point is stated")
    curvatures, centres, lr, steps = (1.0, 4.0), (-1.0, 2.0), 0.1, 5
    strategy = method.build(**{**method.settling, "seed": 3, "fraction_evaluate": 0.0})
    weights = (1 / 2, 1 / 2) if strategy.weighting == "uniform" else (1 / 3, 2 / 3)
    expected = method.fixed_point(curvatures, centres, weights, lr, steps)
    actual = train(
        strategy,
        method.make_client,
        rounds=120,
        clients=problem.quadratic_clients(curvatures, centres),
        model=problem.Point,
        lr=lr,
        length={"local-steps": steps},
        loss_fn=problem.half_squared_error,
    )
    agree(actual[-1], {"v": np.array([expected])}, 1e-6, "after 120 rounds")
    if signs := [e["divergence"] for e in strategy.history if "divergence" in e]:
        raise LawBroken(signs[0])
