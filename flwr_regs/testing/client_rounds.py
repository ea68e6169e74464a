"""Laws of a client's round: hooks, runners, client state and incomplete clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from flwr_regs.abilities import Probes, TakesBack
from flwr_regs.client.local_training import LocalResult, local_round
from flwr_regs.flower.app import RegClientApp
from flwr_regs.flower.client_round import ClientRound
from flwr_regs.flower.grids.in_process import InProcessGrid
from flwr_regs.flower.grids.stacked_grid import StackedGrid
from flwr_regs.term import Slot
from flwr_regs.testing import problem, spies
from flwr_regs.testing.method import LawBroken, Method, Skipped, agree, by_round, law
from flwr_regs.testing.problem import make_clients, make_model, train


@law("hooks are pure: they change no argument, return no view, and remember nothing")
def pure(method: Method) -> None:
    """Every call of every hook in a run with partial participation and step budgets."""
    faults: list[str] = []
    with spies.spied(method.terms, spies.ARGUMENTS, spies.impurities(faults)):
        train(
            method.build(seed=3, fraction_train=0.75),
            method.make_client,
            rounds=3,
            step_budget=6,
        )
    if faults:
        raise LawBroken("; ".join(dict.fromkeys(faults)))


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
    {"plain loop": {"loop": "plain"}, "own loop": {"loop": "own"}},
)
def runners(method: Method, loop: str) -> None:
    """To the bit. The plain loop runs the recorded rounds last first, so that nothing can be left over."""
    if loop == "plain":
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
            torch.autograd.backward(
                loop.loss(cross_entropy(output, targets), inputs, targets, output)
            )
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


@law(
    "a reply that is not used leaves no trace",
    {"model": {"what": "model"}, "slots": {"what": "slots"}},
)
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
    if any(isinstance(t, TakesBack) or t.keeps == "always" for t in method.terms):
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
        before, after = (
            second.settings["client"].get(t.name, {}),
            second.result.client.get(t.name, {}),
        )
        expected = before
        if t.keeps == "always":
            expected = after
        elif isinstance(t, TakesBack) and after:
            expected = t.unused(before, after)
        agree(third.settings["client"].get(t.name, {}), expected, 0.0, f"client slot of '{t.name}'")


@law("an incomplete client counts what was done, not what was planned")
def incomplete(method: Method) -> None:
    """A client that stops after s_k of its E steps sends what one that was asked for s_k steps sends."""
    for call in looped(method, rounds=3, step_budget=5)[0]:
        done = call.result.num_steps
        where = f"client {call.client}, after {done} of {call.result.planned_steps} steps"
        same_result(call.result, again(call, epochs=None, steps=done, max_steps=None), where)
