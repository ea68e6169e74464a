"""Theory as tests, beside the law `fixed-point`: biases as formulas in K, and both sides of limits.

Clients have the losses ``a_k/2 (v − c_k)²``: see :mod:`flwr_regs.testing.problem`.
"""

from typing import Any

import pytest

import flwr_regs as fr
from flwr_regs.testing.problem import (
    Point,
    half_squared_error,
    quadratic_clients,
    start_weights,
    train,
)
from tests.conftest import budgeted, close, make_clients, to_numpy
from tests.laws import minimum
from tests.oracles.client_step.gate import fedgate, vrlsgd
from tests.oracles.client_step.scaffold import scaffold
from tests.oracles.model import gradient
from tests.oracles.rounds import plus

CURVATURES, CENTRES, HALVES = (1.0, 4.0), (-1.0, 2.0), (0.5, 0.5)


def path(
    name: str, steps: int, rounds: int, budgets: dict[int, int] | None = None, **settings: Any
) -> list[float]:
    """Return w from 0 after each round of a method, with uniform weights."""
    options = {"weighting": "uniform", "on_divergence": "warn", "fraction_evaluate": 0.0, "seed": 3}
    few = {"min_train_nodes": 1, "min_available_nodes": 1}
    strategy = getattr(fr, name)(**{**options, **few, **settings})
    models = train(
        strategy,
        budgeted(getattr(fr, f"{name}Client"), [budgets or {}]),
        rounds=rounds,
        clients=quadratic_clients(CURVATURES, CENTRES),
        model=Point,
        lr=0.1,
        length={"local-steps": steps},
        loss_fn=half_squared_error,
    )
    return [float(m["v"][0]) for m in models]


# fixed points


EXACT: dict[str, dict[str, Any]] = {
    "SCAFFOLD": {},
    "FedDyn": {"alpha": 2.0},
    "VRLSGD": {},
    "FedGATE": {},
    "Mime": {"beta": 0.3},
}


@pytest.mark.parametrize("name", EXACT)
def test_under_unequal_steps_gradient_tracking_alone_is_biased(name: str) -> None:
    """``Σ_k K_k d_k`` stays 0, not ``Σ d_k``: VRL-SGD and FedGATE settle where ``Σ K_k ∇f_k = 0``."""
    (*_, w) = path(name, 8, 70, budgets={0: 2}, **EXACT[name])
    weights = (0.2, 0.8) if name in ("VRLSGD", "FedGATE") else HALVES
    assert w == pytest.approx(minimum(CURVATURES, CENTRES, weights), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "oracle", "settings"),
    [
        ("SCAFFOLD", scaffold, {"server_lr": 0.8}),
        ("VRLSGD", vrlsgd, {}),
        ("FedGATE", fedgate, {"server_lr": 0.8}),
    ],
)
def test_weight_decay_makes_corrected_steps_those_of_the_l2_regularised_loss(
    name: str, oracle: Any, settings: dict[str, Any]
) -> None:
    """It is part of the gradient that a client's steps are corrected by: ``∇f(v) + λ v``."""
    decay, some = 0.1, {"seed": 8, "fraction_train": 0.6, "min_train_nodes": 1}
    strategy, data = getattr(fr, name)(**settings, **some), make_clients(5)
    models = train(
        strategy,
        getattr(fr, f"{name}Client"),
        rounds=5,
        clients=data,
        length={"local-epochs": 2, "weight-decay": decay},
    )
    expected = oracle(
        start_weights(),
        to_numpy(data),
        5,
        lambda t: 0.2,
        2,
        cohorts=[entry["cohort"] for entry in strategy.history],
        slope=lambda v, x, y: plus(gradient(v, x, y), decay, v),
        **settings,
    )
    for ours, theirs in zip(models, expected, strict=True):
        close(ours, theirs, 1e-10)
