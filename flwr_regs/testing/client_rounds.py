"""Laws of a client's round: hooks, runners, client state and incomplete clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from flwr_regs.abilities import Probes, TakesBack
from flwr_regs.chain import chain
from flwr_regs.client.local_training import local_round
from flwr_regs.client.train.client_result import LocalResult
from flwr_regs.client.train.trainable import trained_parameters
from flwr_regs.cohort.member_view import owner
from flwr_regs.flower.app import RegClientApp
from flwr_regs.flower.client_round import ClientRound
from flwr_regs.flower.grids.in_process import InProcessGrid
from flwr_regs.term import Arrays, ClientContext, ServerContext, Slot, Term
from flwr_regs.testing import problem, spies
from flwr_regs.testing.method import LawBroken, Method, Skipped, agree, by_round
from flwr_regs.testing.problem import make_clients, make_model, train
from flwr_regs.testing.stacked_hooks import cohort_round


def pure(method: Method) -> None:
    """Every call of every hook in a run with partial participation and step budgets."""
    found: list[str] = []
    with spies.spied(method.terms, spies.ARGUMENTS, spies.impurities(found)):
        train(
            method.build(seed=3, fraction_train=0.75),
            method.make_client,
            rounds=3,
            step_budget=6,
        )
    if found:
        raise LawBroken("; ".join(dict.fromkeys(found)))


def local_calls(method: Method, **settings: Any) -> list[spies.LocalCall]:
    """Return every client's round in a run of three; Skipped if the method's client has its own loop."""
    calls: list[spies.LocalCall] = []
    with spies.recorded(calls):
        train(method.build(seed=3), method.make_client, rounds=3, **settings)
    if not calls:
        raise Skipped("its client does not train in the package's loop")
    return calls


def again(call: spies.LocalCall, **settings: Any) -> LocalResult:
    """Run a recorded client's round once more, on a model of its own and without Flower."""
    model = make_model()
    model.load_state_dict(call.weights)
    return local_round(model, call.term, call.data, **{**call.settings, **settings})


def same_result(found: LocalResult, expected: LocalResult, where: str) -> None:
    """Raise LawBroken unless two clients' rounds sent and kept the same bits."""
    agree(found.state, expected.state, 0.0, f"{where}, the model")
    for slot in ("upload", "client"):
        agree(flat(getattr(found, slot)), flat(getattr(expected, slot)), 0.0, f"{where}, {slot}")


def flat(slots: Slot) -> dict[str, Any]:
    """Return the terms' slots as one dict, without empty ones."""
    return {f"{t}.{key}": a for t, slot in slots.items() for key, a in slot.items()}


def runners(method: Method, loop: str) -> None:
    """To the bit. The plain loop runs the recorded rounds last first, so that nothing can be left over."""
    if loop == "plain":
        for call in reversed(local_calls(method)):
            same_result(again(call), call.result, f"client {call.client} in the plain loop")
        return
    options = {"seed": 3, "fraction_train": 0.75, "fraction_evaluate": 0.0}
    expected = train(method.build(**options), method.make_client)
    grid = InProcessGrid(own_loop(method), len(make_clients()))
    found = train(method.build(**options), method.make_client, grid=grid)
    by_round(found, expected, 0.0)


def own_loop(method: Method) -> ClientApp:
    """Return an app whose train function is a training loop as a user writes it."""
    data = make_clients()
    one = method.make_client(make_model(), data[0], data[0], device="cpu")
    kind = type(one) if one.method else one.terms
    app = RegClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        model, mine = make_model(), data[int(context.node_config["partition-id"])]
        loop = ClientRound(message, kind, model, mine, device="cpu")
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


def stacked(method: Method, remembering: bool) -> None:
    """The last of three rounds, with ragged step counts; 1e-12, or 1e-6 for arrays in float32."""
    if remembering:
        strategy, client = method.beside(Remember(0.1), seed=3)
        method = replace(method, strategy=strategy, client=client, settings={})
    calls = sorted(local_calls(method)[-4:], key=lambda c: c.client)
    steps = [c.result.num_steps for c in calls]
    x, y = (
        torch.stack(
            [torch.stack([c.data[s % len(c.data)][i] for s in range(max(steps))]) for c in calls]
        )
        for i in (0, 1)
    )
    whole = [[torch.cat([batch[i] for batch in c.data]) for c in calls] for i in (0, 1)]
    pad = torch.nn.utils.rnn.pad_sequence
    model, term = make_model(), calls[0].term
    model.load_state_dict(calls[0].weights)
    trained = trained_parameters(model, chain([term]))
    model.requires_grad_(False)
    try:
        delta, upload, kept = cohort_round(
            model,
            term,
            {n: p.detach() for n, p in trained.items()},
            x,
            y,
            torch.tensor(steps),
            calls[0].settings["lr"],
            stack([c.settings["broadcast"] for c in calls]),
            stack([c.settings["client"] for c in calls]),
            torch.stack([torch.bincount(labels, minlength=3) for labels in whole[1]]),
            pad(whole[0], True, float("nan")),
            pad(whole[1], True),
            "2",
        )
    except LawBroken:
        raise
    except Exception as error:  # whatever torch.func raises
        raise LawBroken(f"it does not run: {type(error).__name__}: {error}") from error
    for k, call in enumerate(calls):
        pairs = [("update", delta, call.result.delta)]
        pairs += [("upload", flat(upload), flat(call.result.upload))]
        pairs += [("client slot", flat(kept), flat(call.result.client))]
        for what, of_all, expected in pairs:
            found = {n: a[k] for n, a in of_all.items()}
            single = any(a.dtype == torch.float32 for a in expected.values())
            agree(found, expected, 1e-6 if single else 1e-12, f"{what} of client {call.client}")


def stack(slots: Sequence[Slot]) -> Slot:
    """Return the clients' slots as one, with a first axis over the clients."""
    first = flat(slots[0])
    for k, slot in enumerate(slots):
        if flat(slot).keys() != first.keys():
            raise LawBroken(f"client {k} holds {sorted(flat(slot))}, client 0 {sorted(first)}")
    return {
        t: {n: torch.stack([s[t][n] for s in slots]) for n in own} for t, own in slots[0].items()
    }


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
    data, now = make_clients(), [0]

    def client(model: Any, mine: Any, *rest: Any, **settings: Any) -> Any:
        steps = budget if mine is data[SHORT] and now[0] == 2 else None
        return method.make_client(model, mine, *rest, step_budget=steps, **settings)

    def next_round(number: int) -> None:
        now[0] = number + 1

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
            expected = t.unused(before, after, second.result.delta)
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


def incomplete(method: Method, where: str) -> None:
    """A client that stops after s_k of its E steps sends what one that was asked for s_k steps sends.

    And a term beside the method sees the s_k of every client.
    """
    budget = 5
    if where == "client":
        for call in local_calls(method, step_budget=budget):
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


def slices(method: Method) -> None:
    """Both halves of all parameters, and of one without the others; slots are cut like the parameters."""
    terms = [t for t in method.terms if t.elementwise]
    if not terms:
        raise Skipped("no term says that it is elementwise")
    found: list[str] = []

    def spy(term: Term, hook: str, original: Any, args: tuple[Any, ...]) -> Any:
        out = original(term, *args)
        grads, params, ctx = args
        for half, names in product((0, 1), (list(grads), list(grads)[-1:])):

            def cut(arrays: Arrays, half: int = half, names: list[str] = names) -> Arrays:
                owners = {key: owner(key, a, grads) for key, a in arrays.items()}
                return {
                    key: a if owners[key] is None else _half(a, half)
                    for key, a in arrays.items()
                    if owners[key] is None or owners[key] in names
                }

            part = replace(
                ctx, start=cut(ctx.start), broadcast=cut(ctx.broadcast), client=cut(ctx.client)
            )
            try:
                agree(original(term, cut(grads), cut(params), part), cut(out), 0.0, "`correct`")
            except Exception as error:  # whatever the term raises on a slice
                found.append(f"'{term.name}', on half {half + 1} of {names}: {error}")
        return out

    with spies.spied(terms, ["correct"], spy):
        train(method.build(seed=3, fraction_evaluate=0.0), method.make_client, rounds=3)
    if found:
        raise LawBroken(found[0])


def _half(array: Any, half: int) -> Any:
    """Return half of the entries, in one axis."""
    row = array.reshape(-1)
    middle = len(row) // 2
    return row[middle:] if half else row[:middle]
