"""FedFOR's default alpha, 2 (1 − m) / K_k: budgets, momentum, own loops; and what is logged."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from flwr_regs import FedFOR, FedFORClient, FirstOrder
from flwr_regs.client.local_training import local_round
from flwr_regs.client.train.optimizer import momentum_of
from flwr_regs.methods.parts import once
from flwr_regs.testing.problem import start_weights
from tests.conftest import budgeted, close, make_clients, make_model, run, to_numpy
from tests.oracles.client_step.fedfor import fedfor

OPTIONS: dict[str, Any] = {"seed": 3, "fraction_evaluate": 0.0}
SGD = torch.optim.SGD


def expected(**settings: Any) -> dict[str, np.ndarray]:
    """The oracle's model after five rounds of four unequal clients, two epochs each."""
    clients = to_numpy(make_clients())
    models = fedfor(start_weights(), clients, 5, lambda t: 0.2, epochs=2, **settings)
    return models[-1]


def apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return float(max(np.abs(a[n] - b[n]).max() for n in a))


def test_a_step_budget_known_beforehand_is_the_number_of_steps() -> None:
    budgets = [4, 2, 5, 10]
    client = budgeted(FedFORClient, [dict(enumerate(budgets))])
    got = run(FedFOR(**OPTIONS), client, rounds=5)
    close(got, expected(alpha=None, max_steps=budgets), 1e-10)
    assert apart(got, run(FedFOR(0.0, **OPTIONS), client, rounds=5)) > 1e-3


@pytest.mark.parametrize("m", [0.5, 0.9])
def test_client_momentum_weakens_it(m: float) -> None:
    make = partial(SGD, momentum=m)
    got = run(FedFOR(**OPTIONS), FedFORClient, rounds=5, optimizer=make)
    close(got, expected(alpha=None, momentum=m), 1e-10)
    half = run(FedFOR(0.1, **OPTIONS), FedFORClient, rounds=5, optimizer=make)
    close(
        half, expected(alpha=0.1, momentum=m), 1e-10
    )  # alpha=x is x a step, whatever the momentum


def strengths(alpha: float | None, make: Any = SGD, steps: int = 4, **settings: Any) -> Any:
    """α of each step of a client's round, as the gradient grows where every coordinate opposes."""
    found = []

    class Watched(FirstOrder):
        def _strength(self, ctx: Any) -> Any:
            found.append(super()._strength(ctx))
            return found[-1]

    g = {n: torch.ones_like(p) for n, p in make_model().named_parameters()}
    local_round(
        make_model(),
        Watched(alpha),
        make_clients()[0],
        lr=0.1,
        steps=steps,
        optimizer=make,
        broadcast=g,
        device="cpu",
        **settings,
    )
    return found


@pytest.mark.parametrize(
    ("make", "m"),
    [
        (SGD, 0.0),
        (partial(SGD, momentum=0.9), 0.9),
        (partial(SGD, momentum=0.9, nesterov=True), 0.9),
        (partial(SGD, momentum=0.9, dampening=0.9), 0.0),  # a step of η in the long run
        (partial(SGD, momentum=0.9, dampening=0.5), 0.8),
        (partial(SGD, momentum=0.9, dampening=1.0), None),  # moves no further than its first step
        (torch.optim.Adam, None),
        (torch.optim.Adagrad, None),
    ],
)
def test_the_momentum_of_an_optimiser(make: Any, m: float | None) -> None:
    p = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    made = make([p], lr=1.0)
    assert momentum_of(made) == pytest.approx(m)
    assert strengths(None, make) == pytest.approx([2 * (1 - (m or 0)) / 4] * 4)
    if m is not None:  # and what it means
        for _ in range(300):
            p.grad = torch.ones_like(p)
            before = p.item()
            made.step()
        assert before - p.item() == pytest.approx(1 / (1 - m))


# What is logged


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(once, "_logged", set())
    caplog.set_level(logging.INFO, logger="flwr")
    return lambda level: [
        r.getMessage()
        for r in caplog.records
        if r.levelno == level and "FedFOR's" in r.getMessage()
    ]


def test_an_optimiser_without_momentum_is_noted_once_in_a_training(logged: Any) -> None:
    for count in (1, 2):
        run(FedFOR(**OPTIONS), FedFORClient, rounds=3, lr=0.01, optimizer=torch.optim.Adam)
        assert len(logged(logging.WARNING)) == count
    assert "takes a client's momentum for 0" in logged(logging.WARNING)[0]
    assert "With Adam and its like the default is far too strong" in logged(logging.WARNING)[0]
    run(FedFOR(0.1, **OPTIONS), FedFORClient, rounds=3, lr=0.01, optimizer=torch.optim.Adam)
    run(FedFOR(**OPTIONS), FedFORClient, rounds=3)
    assert len(logged(logging.WARNING)) == 2


@pytest.mark.parametrize("m", [0.0, 0.5])
def test_a_value_that_can_collapse_is_named_once(m: float, logged: Any) -> None:
    make = partial(SGD, momentum=m)
    train = {"local-steps": 10}
    options = {"rounds": 3, "train": train, "lr": 0.01, "optimizer": make}
    run(FedFOR(0.59 * (1 - m), **OPTIONS), FedFORClient, **options)
    run(FedFOR(**OPTIONS), FedFORClient, **options)
    assert logged(logging.WARNING) == []
    for count in (1, 2):
        run(FedFOR(0.61 * (1 - m), **OPTIONS), FedFORClient, **options)
        assert len(logged(logging.WARNING)) == count
    assert f"above {6 * (1 - m) / 10:.3g} training can collapse" in logged(logging.WARNING)[0]
