"""Theory as tests, beside the law `fixed-point`: biases as formulas in K, and both sides of limits.

Clients have the losses ``a_k/2 (v − c_k)²``: see :mod:`flwr_regs.testing.problem`.
"""

from typing import Any

import pytest

import flwr_regs as fr
from flwr_regs.testing.problem import Point, half_squared_error, quadratic_clients, train
from tests.conftest import budgeted
from tests.laws import minimum

CURVATURES, CENTRES, HALVES = (1.0, 4.0), (-1.0, 2.0), (0.5, 0.5)


def path(
    name: str, steps: int, rounds: int, budgets: dict[int, int] | None = None, **settings: Any
) -> list[float]:
    """Return w from 0 after each round of a method, with uniform weights."""
    options = {"weighting": "uniform", "on_divergence": "warn", "fraction_evaluate": 0.0, "seed": 3}
    few = {"min_train_nodes": 1, "min_available_nodes": 1}
    strategy = getattr(fr, name)(**{**options, **few, **settings})
    client = budgeted(getattr(fr, f"{name}Client"), [budgets or {}])
    how: dict[str, Any] = {"model": Point, "lr": 0.1, "loss_fn": half_squared_error}
    how |= {"clients": quadratic_clients(CURVATURES, CENTRES), "length": {"local-steps": steps}}
    models = train(strategy, client, rounds=rounds, **how)
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
