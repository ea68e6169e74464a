"""FedFOR's default alpha, 2 (1 − m) / K_k, with client momentum; and what is logged."""

from functools import partial
from typing import Any

import pytest
import torch

from flwr_regs import FedFOR, FedFORClient
from flwr_regs.client.train.optimizer import momentum_of
from flwr_regs.methods.parts import once
from flwr_regs.testing.problem import start_weights, train
from tests.conftest import QUIET, Log, close, make_clients, to_numpy
from tests.oracles.client_step.fedfor import fedfor

SGD = torch.optim.SGD


@pytest.mark.parametrize("alpha", [None, 0.1])
def test_client_momentum_weakens_the_default_alone(alpha: float | None) -> None:
    make = partial(SGD, momentum=0.9)
    models = train(FedFOR(alpha, **QUIET), FedFORClient, optimizer=make)
    plan = (start_weights(), to_numpy(make_clients()), 4, lambda t: 0.2, 2)
    close(models[-1], fedfor(*plan, alpha=alpha, momentum=0.9)[-1], 1e-10)


@pytest.mark.parametrize(
    ("make", "m"),
    [
        (SGD, 0.0),
        (partial(SGD, momentum=0.9, nesterov=True), 0.9),
        (partial(SGD, momentum=0.9, dampening=0.9), 0.0),  # a step of η in the long run
        (partial(SGD, momentum=0.9, dampening=0.5), 0.8),
        (partial(SGD, momentum=0.9, dampening=1.0), None),  # moves no further than its first step
        (lambda params, lr: SGD(params, 3 * lr, momentum=0.9), 1 - 0.1 / 3),
        (torch.optim.Adam, None),
        (torch.optim.Adagrad, None),
    ],
)
def test_the_momentum_of_an_optimiser(make: Any, m: float | None) -> None:
    p = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = make([p], lr=1.0)
    assert momentum_of(optimizer, 1.0) == pytest.approx(m)
    if m is not None:  # and what it means
        for _ in range(300):
            p.grad = torch.ones_like(p)
            before = p.item()
            optimizer.step()
        assert before - p.item() == pytest.approx(1 / (1 - m))


# What is logged


@pytest.fixture
def warnings(log: Log, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those since it was last called."""
    monkeypatch.setattr(once, "_logged", set())
    return lambda: log("FedFOR's")


def test_an_optimiser_without_momentum_is_noted_once_in_a_training(warnings: Any) -> None:
    short: dict[str, Any] = {"rounds": 3, "lr": 0.01}
    for _ in range(2):
        train(FedFOR(**QUIET), FedFORClient, optimizer=torch.optim.Adam, **short)
        (said,) = warnings()
    assert "default alpha is for SGD" in said
    assert "With Adam and its like the default is far too strong" in said
    train(FedFOR(0.1, **QUIET), FedFORClient, optimizer=torch.optim.Adam, **short)
    train(FedFOR(**QUIET), FedFORClient, **short)
    assert warnings() == []


@pytest.mark.parametrize("m", [0.0, 0.5])
def test_a_value_that_can_collapse_is_named_once(m: float, warnings: Any) -> None:
    options = {"rounds": 3, "length": {"local-steps": 10}, "lr": 0.01}
    options |= {"optimizer": partial(SGD, momentum=m)}
    for alpha in (0.59 * (1 - m), None):
        train(FedFOR(alpha, **QUIET), FedFORClient, **options)
    assert warnings() == []
    for _ in range(2):
        train(FedFOR(0.61 * (1 - m), **QUIET), FedFORClient, **options)
        (said,) = warnings()
    assert f"above {6 * (1 - m) / 10:.3g} training can collapse" in said
