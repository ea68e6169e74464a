"""The laws, of a client's round and of a whole run: each is a check that raises where it does not hold."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from flwr_regs.abilities import Probes, Recovers, TakesBack, Withholds
from flwr_regs.client.local_training import LocalResult, local_round
from flwr_regs.flower.app import RegClientApp
from flwr_regs.flower.client_round import ClientRound
from flwr_regs.flower.grids.in_process import InProcessGrid
from flwr_regs.flower.grids.stacked_grid import StackedGrid
from flwr_regs.methods.server_step.fedavg import FedAvg, FedAvgClient
from flwr_regs.term import Arrays, ClientContext, ServerContext, Slot, Term
from flwr_regs.testing import problem, spies
from flwr_regs.testing.method import LawBroken, Method, Skipped, agree, by_round, law
from flwr_regs.testing.problem import make_clients, make_model, train


@cache
def fedavg_run(weighting: str) -> list[problem.NDArrays]:
    """Return FedAvg's models."""
    return train(FedAvg(seed=3, weighting=weighting), FedAvgClient)


@lru_cache(maxsize=4)
def usual_run(method: Method) -> list[problem.NDArrays]:
    """Return the method's models, with which several laws compare others."""
    return train(method.build(seed=3), method.make_client)


@law("hooks are pure: they change no argument, return no view, and remember nothing")
def pure(method: Method) -> None:
    """Every call of every hook in a run with partial participation and step budgets."""
    faults: list[str] = []
    with spies.spied(method.terms, spies.ARGUMENTS, spies.impurities(faults)):
        strategy = method.build(seed=3, fraction_train=0.75)
        train(strategy, method.make_client, rounds=3, step_budget=6)
    if faults:
        raise LawBroken("; ".join(dict.fromkeys(faults)))


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
    apart = np.concatenate([np.ravel(a - plain[n]) for n, a in actual.items()])
    if not (apart.max() > 1e-3 and apart.min() < -1e-3):
        found = f"{apart.min():.3g} to {apart.max():.3g}"
        raise LawBroken(f"expected differences from FedAvg beyond ±1e-3, found {found}")


@law("a whole run equals the oracle", "num-examples, epochs", "uniform, steps", "some clients")
def oracle(method: Method, variant: str) -> None:
    """Clients of unequal size and a learning rate that falls, in float64; after every round.

    With both weightings, and both ways to say how long a client trains; and with some of the clients.
    """
    if method.oracle is None:
        raise Skipped("no oracle is given")
    some, steps = variant == "some clients", variant == "uniform, steps"

    def falling(t: int) -> float:
        return float(0.8 ** (t - 1))

    options: dict[str, Any] = {"seed": 11, "lr_schedule": falling, "min_train_nodes": 1}
    options |= {"fraction_train": 0.6} if some else {"weighting": variant.partition(",")[0]}
    strategy, clients = method.build(**options), make_clients(5 if some else 4)
    length = {"local-steps": 7} if steps else {"local-epochs": 2}
    actual = train(strategy, method.make_client, rounds=5, clients=clients, length=length)
    asked: dict[str, Any] = {"local_steps": 7} if steps else {"epochs": 2}
    if some:
        asked["cohorts"] = [entry["cohort"] for entry in strategy.history]
    usual = {"epochs": 1, "local_steps": None, "cohorts": None, "weighting": strategy.weighting}
    offered = {**usual, "gradient": problem.gradient, **asked}
    known = inspect.signature(method.oracle).parameters
    variadic = any(p.kind is p.VAR_KEYWORD for p in known.values())
    taken = {n: v for n, v in offered.items() if n in known or variadic}
    if missing := sorted(asked.keys() - taken):
        raise Skipped(f"the oracle takes no {', '.join(missing)}")
    start, data = problem.start_weights(), problem.to_numpy(clients)
    more = {**taken, **method.oracle_settings}
    expected = method.oracle(start, data, 5, lambda t: 0.2 * falling(t), **more)
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
    strategies = (method.build(seed=3, downlink=kind) for kind in ("delta", "model"))
    actual, expected = (train(strategy, method.make_client) for strategy in strategies)
    by_round(actual, expected, 0.0)


@law("neither the order of the replies nor which client is which matters", "replies", "clients")
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


@law("chaining a term that does nothing changes no bit", "first", "last")
def identity(method: Method, place: str) -> None:
    """First, or last (but ahead of a term that compresses)."""
    actual = train(*method.beside(Nothing(), first=place == "first", seed=3))
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
    task: dict[str, Any] = {"model": problem.Point, "loss_fn": problem.half_squared_error}
    task |= {"clients": problem.quadratic_clients(curvatures, centres), "rounds": 120, "lr": lr}
    actual = train(strategy, method.make_client, length={"local-steps": steps}, **task)
    agree(actual[-1], {"v": np.array([expected])}, 1e-6, "after 120 rounds")
    if signs := [e["divergence"] for e in strategy.history if "divergence" in e]:
        raise LawBroken(signs[0])


def looped(method: Method, **settings: Any) -> tuple[list[spies.LocalCall], list[problem.NDArrays]]:
    """Return every client's round in a run, and its models; Skipped if the client has its own loop."""
    calls: list[spies.LocalCall] = []
    with spies.recorded(calls):
        models = train(method.build(seed=3), method.make_client, **settings)
    if not calls:
        raise Skipped("its client does not train in the package's loop")
    return calls, models


def again(call: spies.LocalCall, **settings: Any) -> LocalResult:
    """Run a recorded client's round once more, on a model of its own and without Flower."""
    model = make_model()
    model.load_state_dict(call.weights)
    return local_round(model, call.term, call.data, **{**call.settings, **settings})


def same_result(actual: LocalResult, expected: LocalResult, where: str) -> None:
    """Raise LawBroken unless two clients' rounds sent and kept the same bits."""
    agree(actual.state, expected.state, 0.0, f"{where}, the model")
    for slot in ("upload", "client"):
        agree(flat(getattr(actual, slot)), flat(getattr(expected, slot)), 0.0, f"{where}, {slot}")


def flat(slots: Slot) -> dict[str, Any]:
    """Return the terms' slots as one dict, without empty ones."""
    return {f"{t}.{key}": a for t, slot in slots.items() for key, a in slot.items()}


@law(
    "every runner gives the same: the plain loop and a user's own loop as the NumPyClient",
    *("plain loop", "own loop"),
)
def runners(method: Method, loop: str) -> None:
    """To the bit. The plain loop runs the recorded rounds last first, so that nothing can be left over."""
    if loop == "plain loop":
        for call in reversed(looped(method, rounds=3)[0]):
            same_result(again(call), call.result, f"client {call.client} in the plain loop")
        return
    options = {"seed": 3, "fraction_train": 0.75, "fraction_evaluate": 0.0}
    expected = train(method.build(**options), method.make_client)
    grid = InProcessGrid(own_loop(method), len(make_clients()))
    actual = train(method.build(**options), method.make_client, grid=grid)
    by_round(actual, expected, 0.0)


def own_loop(method: Method) -> ClientApp:
    """Return an app whose train function is a training loop as a user writes it."""
    data = make_clients()
    one = method.make_client(make_model(), data[0], data[0], device="cpu")
    kind = type(one) if one.method else one.composition
    app = RegClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        model, batches = make_model(), data[int(context.node_config["partition-id"])]
        loop = ClientRound(message, kind, model, batches, device="cpu")
        optimizer = loop.optimizer(torch.optim.SGD)
        for inputs, targets in loop.batches():
            optimizer.zero_grad()
            output = model(inputs)
            loss = loop.loss(cross_entropy(output, targets), inputs, targets, output)
            torch.autograd.backward(loss)
            loop.correct()
            optimizer.step()
        return loop.reply()

    return app


@law("a cohort stacked under torch.func.vmap equals the loop")
def stacked(method: Method) -> None:
    """After each round; 1e-12, or 1e-6 for arrays in float32.

    Clients with unequal steps; then with as many, where elementwise terms see all clients at once.
    """
    if method.build().term.coder("release") is not None:
        raise Skipped("the model travels in a code")
    data = make_clients()
    for length in ({"local-epochs": 2}, {"local-steps": 3}):
        calls, expected = looped(method, length=length)
        grid = StackedGrid(problem.app_of(method.make_client, data), len(data))
        actual = train(method.build(seed=3), method.make_client, grid=grid, length=length)
        if grid.fallbacks:
            raise LawBroken(f"it does not run: {'; '.join(grid.fallbacks)}")
        slots = [flat(s) for call in calls for s in (call.result.upload, call.result.client)]
        half = any(a.dtype == torch.float32 for slot in slots for a in slot.values())
        by_round(actual, expected, 1e-6 if half else 1e-12)


@law("a reply that is not used leaves no trace", "model", "slots")
def unused(method: Method, what: str) -> None:
    """A client that is dropped as incomplete in a round goes on as if it had taken no step.

    Its next round starts with the client slots from before, or with what a term's `unused` returns. A
    term that keeps ``"always"`` goes on with the new slot.
    """
    if what == "slots":
        calls: list[spies.LocalCall] = []
        with spies.recorded(calls):
            with_short_client(method, budget=1)
        slots_after_unused(method, [c for c in calls if c.client == SHORT])
        return
    kinds = TakesBack, Withholds  # private entries go on from the last reply that arrived
    if any(isinstance(t, kinds) or t.keeps == "always" for t in method.terms):
        raise Skipped("it keeps something of a round in any case")
    by_round(with_short_client(method, budget=1), with_short_client(method, budget=0), 0.0)


SHORT = 2  # the client that takes fewer steps in round 2


def with_short_client(method: Method, budget: int) -> list[problem.NDArrays]:
    """Return the models of a run in which one client gets `budget` steps in round 2, and is dropped."""
    data, round_number = make_clients(), [0]

    def client(model: Any, batches: Any, *rest: Any, **settings: Any) -> Any:
        steps = budget if batches is data[SHORT] and round_number[0] == 2 else None
        return method.make_client(model, batches, *rest, step_budget=steps, **settings)

    def next_round(number: int) -> None:
        round_number[0] = number + 1

    strategy = method.build(seed=3, incomplete="drop", fraction_evaluate=0.0)
    return train(strategy, client, clients=data, on_round=next_round)


def slots_after_unused(method: Method, calls: Sequence[spies.LocalCall]) -> None:
    """Raise LawBroken unless the client's third round starts with the right slots."""
    if not calls:
        raise Skipped("its client does not train in the package's loop")
    _, second, third, *_ = calls
    for t in method.terms:
        if isinstance(t, Probes):  # its slot is that of the round's own probe
            continue
        slots = second.settings["client"], second.result.client, third.settings["client"]
        before, after, begun = (slot.get(t.name, {}) for slot in slots)
        expected = before
        if t.keeps == "always":
            expected = after
        elif isinstance(t, TakesBack) and after:
            expected = t.unused(before, after)
        agree(begun, expected, 0.0, f"client slot of '{t.name}'")


@law("an incomplete client counts what was done, not what was planned")
def incomplete(method: Method) -> None:
    """A client that stops after s_k of its E steps sends what one that was asked for s_k steps sends."""
    for call in looped(method, rounds=3, step_budget=5)[0]:
        done = call.result.num_steps
        where = f"client {call.client}, after {done} of {call.result.planned_steps} steps"
        same_result(call.result, again(call, epochs=None, steps=done, max_steps=None), where)
