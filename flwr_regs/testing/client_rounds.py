"""Laws of a client's round: hooks, runners, client state and incomplete clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from flwr_regs.abilities import Probes, TakesBack
from flwr_regs.client.local_training import local_round
from flwr_regs.client.train.client_result import LocalResult
from flwr_regs.flower.app import RegClientApp
from flwr_regs.flower.client_round import ClientRound
from flwr_regs.flower.grids.in_process import InProcessGrid
from flwr_regs.flower.grids.stacked_grid import StackedGrid
from flwr_regs.term import Arrays, ClientContext, ServerContext, Slot, Term
from flwr_regs.testing import problem, spies
from flwr_regs.testing.law import law
from flwr_regs.testing.method import LawBroken, Method, Skipped, agree, by_round
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
    kind = type(one) if one.method else one.terms
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


@dataclass(frozen=True)
class Remember(Term):
    """A term with client state and an upload, to show that a runner carries both."""

    name: ClassVar[str] = "remember"
    keeps_delta: ClassVar[bool] = True
    rate: float

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        return base + self.rate * sum((p**2).sum() for p in params.values())

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        memory = {
            n: (ctx.client[n] if n in ctx.client else torch.zeros_like(d)) + d / ctx.num_steps
            for n, d in delta.items()
        }
        sent = {n: d + self.rate * memory[n] for n, d in delta.items()}
        return sent, {n: 2 * m for n, m in memory.items()}, memory


@law(
    "a cohort stacked under torch.func.vmap equals the loop",
    {"alone": {"remembering": False}, "with client state": {"remembering": True}},
)
def stacked(method: Method, remembering: bool) -> None:
    """Clients with unequal steps, after each round; 1e-12, or 1e-6 for arrays in float32."""
    if remembering:
        strategy, client = method.beside(Remember(0.1), seed=3)
        method = replace(method, strategy=strategy, client=client, settings={})
    if method.build().term.coder("release") is not None:
        raise Skipped("the model travels in a code")
    calls, expected = looped(method)
    data = make_clients()
    grid = StackedGrid(problem.app_of(method.make_client, data), len(data))
    actual = train(method.build(seed=3), method.make_client, grid=grid)
    if grid.fallbacks:
        raise LawBroken(f"it does not run: {'; '.join(grid.fallbacks)}")
    kept = [
        a
        for c in calls
        for slots in (c.result.upload, c.result.client)
        for a in flat(slots).values()
    ]
    by_round(actual, expected, 1e-6 if any(a.dtype == torch.float32 for a in kept) else 1e-12)


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


@dataclass(frozen=True)
class Witness(Term):
    """Uploads the steps that `finish` sees; the server keeps them, and those that it counts itself."""

    name: ClassVar[str] = "witness"
    keeps_delta: ClassVar[bool] = True

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {"steps": torch.tensor([ctx.num_steps, ctx.planned_steps])}, {}

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        return {
            str(pid): np.array([upload["steps"], [r.num_steps, r.planned_steps]])
            for (pid, upload), r in zip(uploads.items(), ctx.replies.values(), strict=True)
        }, delta


@law(
    "an incomplete client counts what was done, not what was planned",
    {"what it sends": {"where": "client"}, "what is seen": {"where": "server"}},
)
def incomplete(method: Method, where: str) -> None:
    """A client that stops after s_k of its E steps sends what one that was asked for s_k steps sends.

    And a term beside the method sees the s_k of every client.
    """
    budget = 5
    if where == "client":
        for call in looped(method, rounds=3, step_budget=budget)[0]:
            asked = {"epochs": None, "steps": call.result.num_steps, "max_steps": None}
            same_result(
                call.result,
                again(call, **asked),
                f"client {call.client}, after {call.result.num_steps} of "
                f"{call.result.planned_steps} steps",
            )
        return
    strategy, client = method.beside(Witness(), seed=3, incomplete="average")
    train(strategy, client, rounds=2, step_budget=budget)
    planned = [2 * len(c) for c in make_clients()]
    expected = {str(k): np.array([[min(n, budget), n]] * 2) for k, n in enumerate(planned)}
    agree(
        strategy.training.model.server["witness"],
        expected,
        0.0,
        "by client, [[s_k, E] in `finish`, [s_k, E] on the server]",
    )
