"""A client whose optimiser keeps its state between rounds: against one long run, and as client state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from torch import nn
from torch.nn.functional import cross_entropy

import flwr_regs as fr
from flwr_regs import ClientContext, Term
from flwr_regs.abilities import Carries
from flwr_regs.client.memory import decode, encode
from flwr_regs.client.train.optimizer import load_state, state_of
from flwr_regs.term import Arrays, Slot
from flwr_regs.testing.problem import (
    RepeatingGrid,
    SerialisingGrid,
    app_of,
    start_weights,
    to_numpy,
    train,
)
from tests.conftest import close, make_clients, make_model
from tests.oracles.model import gradient

QUIET: dict[str, Any] = {"seed": 3, "fraction_evaluate": 0.0}
ONE: dict[str, Any] = {**QUIET, "min_train_nodes": 1, "min_available_nodes": 1}
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.05),
    "SGD": partial(torch.optim.SGD, momentum=0.8, nesterov=True),
}


def long_run(make: Any, rounds: int, fresh: bool) -> dict[str, Any]:
    """Two epochs a round of client 0, in plain torch; `fresh`: a new optimiser in each round."""
    model, (data,) = make_model(), make_clients(1)
    optimizer = make(model.parameters(), lr=0.02)
    for _ in range(rounds):
        if fresh:
            optimizer = make(model.parameters(), lr=0.02)
        for x, y in data * 2:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return {n: v.numpy() for n, v in model.state_dict().items()}


def own_loop(make: Any, **settings: Any) -> fr.InProcessGrid:
    app, (data,) = fr.RegClientApp(), make_clients(1)

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        model = make_model()
        loop = fr.ClientRound(message, fr.FedAvgClient, model, data, device="cpu", **settings)
        optimizer = loop.optimizer(make)
        for inputs, targets in loop.batches():
            optimizer.zero_grad()
            output = model(inputs)
            loop.loss(cross_entropy(output, targets), inputs, targets, output).backward()
            loop.correct()
            optimizer.step()
        return loop.reply()

    return fr.InProcessGrid(app, 1)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("keep", [True, False])
def test_one_client_is_one_long_run_if_its_optimiser_goes_on(name: str, keep: bool) -> None:
    """Else each round is a run of its own, as ever; both in a loop of one's own, too."""
    make, how = MAKERS[name], {"lr": 0.02, "rounds": 3, "clients": make_clients(1)}
    settings = {"optimizer": make, "keep_optimizer": keep}
    found = train(fr.FedAvg(**ONE), fr.FedAvgClient, **how, **settings)[-1]
    close(found, long_run(make, 3, fresh=not keep), 1e-12)
    other = long_run(make, 3, fresh=keep)
    assert max(abs(found[n] - other[n]).max() for n in found) > 1e-3
    looped = train(
        fr.FedAvg(**ONE), fr.FedAvgClient, **how, grid=own_loop(make, keep_optimizer=keep)
    )
    close(looped[-1], found, 0.0)


@pytest.mark.parametrize("grid", [SerialisingGrid, RepeatingGrid])
def test_the_state_is_client_state(grid: Any) -> None:
    """It goes through bytes, and a round that the server repeats begins with the state from before it."""
    settings = {"optimizer": MAKERS["AdamW"], "keep_optimizer": True}
    model = partial(make_model, batch_norm=True)  # FedBN's private parameters have state, too
    found = []
    for kind in (fr.InProcessGrid, grid):
        app = app_of(fr.FedBNClient, make_clients(), model=model, **settings)
        places = kind(app, 4)
        strategy = fr.FedBN(fraction_train=0.75, **QUIET)
        found.append(train(strategy, fr.FedBNClient, grid=places, lr=0.02, model=model))
        assert all(not e["lost_state"] for e in strategy.history)
    for a, b in zip(*found, strict=True):
        close(a, b, 0.0)


@pytest.mark.parametrize("name", ["Adam", "Rprop", "ASGD"])
def test_each_optimiser_goes_on_where_it_was(name: str) -> None:
    """With two groups, in another order than the model's parameters; through the bytes that are kept."""
    dtype = torch.bfloat16 if name == "AdamW" else torch.float64

    def fresh(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = reversed(list(model.parameters()))
        kind = getattr(torch.optim, name)
        return kind([{"params": others}, {"params": [first]}], lr=0.05)  # type: ignore[no-any-return]

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in make_clients()[1]:
            optimizer.zero_grad()
            cross_entropy(model(x.to(dtype)), y).backward()
            optimizer.step()

    model = make_model(dtype)
    optimizer = fresh(model)
    steps(model, optimizer)
    state = state_of(optimizer, dict(model.named_parameters()))
    kept = decode(encode({"optimizer": state}))
    again = make_model(dtype)
    again.load_state_dict(model.state_dict())
    restored = fresh(again)
    load_state(restored, dict(again.named_parameters()), kept.get("optimizer", {}))
    steps(model, optimizer)
    steps(again, restored)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@dataclass(frozen=True)
class MeanMoments(Term, Carries):
    """FedAdamW's idea: AdamW begins with the mean of the clients' second moments, and counts on."""

    name: ClassVar[str] = "mean-moments"
    keeps_delta: ClassVar[bool] = True

    def optimizer_start(self, ctx: ClientContext) -> Arrays:
        moments = ctx.broadcast
        first = {k.replace("_sq", ""): 0 * v for k, v in moments.items() if k != "step"}
        return {**moments, **first}

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        state = ctx.optimizer_state
        return delta, {k: v for k, v in state.items() if "_sq" in k or k == "step"}, {}

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: Any) -> tuple[Slot, Arrays]:
        names = next(iter(uploads.values()))
        return {n: sum(u[n] for u in uploads.values()) / len(uploads) for n in names}, delta

    def broadcast(self, server: Slot, ctx: Any) -> Slot:
        return {k: np.asarray(v) for k, v in server.items()}


def adamw_by_hand(rounds: int, lr: float = 0.02, decay: float = 0.05) -> dict[str, Any]:
    """In numpy: the model is averaged, and so are the second moments; the first begin at 0."""
    w, clients = start_weights(), to_numpy(make_clients(3))
    mean = {n: np.zeros_like(a) for n, a in w.items()}
    steps, shares = 0.0, [sum(len(y) for _, y in c) for c in clients]
    for _ in range(rounds):
        ends, squares, counts = [], [], []
        for data in clients:
            v, t = dict(w), steps
            m, s = {n: np.zeros_like(a) for n, a in w.items()}, dict(mean)
            for x, y in data:
                g, t = gradient(v, x, y), t + 1
                for n in v:
                    m[n] = 0.9 * m[n] + 0.1 * g[n]
                    s[n] = 0.999 * s[n] + 0.001 * g[n] ** 2
                    size = (s[n] / (1 - 0.999**t)) ** 0.5 + 1e-8
                    v[n] = v[n] * (1 - lr * decay) - lr * m[n] / (1 - 0.9**t) / size
            ends.append(v)
            squares.append(s)
            counts.append(t)
        p = [n / sum(shares) for n in shares]
        w = {n: sum(q * e[n] for q, e in zip(p, ends, strict=True)) for n in w}
        mean = {n: sum(s[n] for s in squares) / 3 for n in mean}
        steps = sum(counts) / 3
    return w


def own_loop_of_terms() -> fr.RegClientApp:
    app, data = fr.RegClientApp(), make_clients(3)

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        batches, model = data[context.node_config["partition-id"]], make_model()
        loop = fr.ClientRound(message, [MeanMoments], model, batches, device="cpu")
        optimizer = loop.optimizer(MAKERS["AdamW"])
        for inputs, targets in loop.batches():
            optimizer.zero_grad()
            loop.objective(inputs, targets).backward()
            loop.correct()
            optimizer.step()
        return loop.reply()

    return app


@pytest.mark.parametrize("runner", ["client", "own loop", "stack"])
def test_moments_that_are_averaged_equal_the_loop_by_hand(runner: str) -> None:
    """With unequal steps, whose mean is the count that all go on from."""
    app = own_loop_of_terms()
    if runner != "own loop":
        client = partial(fr.RegClient, terms=[MeanMoments])
        app = app_of(client, make_clients(3), optimizer=MAKERS["AdamW"])
    grid = (fr.StackedGrid if runner == "stack" else fr.InProcessGrid)(app, 3)
    how: dict[str, Any] = {"rounds": 3, "lr": 0.02, "length": {"local-epochs": 1}}
    found = train(fr.RegStrategy([MeanMoments()], **QUIET), fr.RegClient, grid=grid, **how)
    close(found[-1], adamw_by_hand(3), 1e-9)
    if isinstance(grid, fr.StackedGrid):
        assert list(grid.fallbacks) == [
            "its optimiser's state is carried, and the members' steps differ"
        ]


# what is refused


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(fr.RoundFailed, match="LBFGS has a list as 'al', expected arrays"):
        train(
            fr.FedAvg(**QUIET),
            fr.FedAvgClient,
            rounds=1,
            optimizer=torch.optim.LBFGS,
            keep_optimizer=True,
        )
    with pytest.raises(fr.RoundFailed, match="the method makes the client's optimiser anew"):
        train(
            fr.FedADC(beta=0.5, local_momentum=0.5, **QUIET),
            fr.FedADCClient,
            rounds=1,
            keep_optimizer=True,
        )
    with pytest.raises(ValueError, match="keep_optimizer must be True or False, not 1"):
        fr.FedAvgClient(make_model(), make_clients()[0], keep_optimizer=1)
