"""Theory as tests, beside the law `fixed-point`: biases as formulas in K, and both sides of limits.

Clients have the losses ``a_k/2 (v − c_k)²``: see :mod:`flwr_regs.testing.problem`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import flwr_regs as fr
from flwr_regs.client.local_training import local_round
from flwr_regs.testing.problem import (
    Point,
    half_squared_error,
    quadratic_clients,
    settled,
    sgd_pull,
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
BEST = minimum(CURVATURES, CENTRES, HALVES)


def path(
    name: str,
    steps: int,
    rounds: int,
    lr: float = 0.1,
    curvatures: Sequence[float] = CURVATURES,
    centres: Sequence[float] = CENTRES,
    budgets: dict[int, int] | None = None,
    **settings: Any,
) -> list[float]:
    """Return w from 0 after each round of a method, with its own weights or uniform ones."""
    options = {"weighting": "uniform", "on_divergence": "warn", "fraction_evaluate": 0.0, "seed": 3}
    few = {"min_train_nodes": 1, "min_available_nodes": 1}
    strategy = getattr(fr, name)(**{**options, **few, **settings})
    models = train(
        strategy,
        budgeted(getattr(fr, f"{name}Client"), [budgets or {}]),
        rounds=rounds,
        clients=quadratic_clients(curvatures, centres),
        model=Point,
        lr=lr,
        length={"local-steps": steps},
        loss_fn=half_squared_error,
    )
    return [float(m["v"][0]) for m in models]


# fixed points


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_fedavg_is_biased_by_the_number_of_steps(steps: int) -> None:
    """``Σ p_k (1 − (1 − η a_k)^K) (c_k − w) = 0``: the minimum for K = 1, the mean centre for many."""
    (*_, w) = path("FedAvg", steps, 60)
    pulls = [1 - (1 - 0.1 * a) ** steps for a in CURVATURES]
    expected = sum(p * c for p, c in zip(pulls, CENTRES, strict=True)) / sum(pulls)
    assert w == pytest.approx(expected, abs=1e-6)
    assert (abs(w - BEST) < 1e-6) == (steps == 1)
    assert settled(CURVATURES, CENTRES, HALVES, 0.1, 10**6) == pytest.approx(sum(CENTRES) / 2)


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


def test_fednova_weighs_unequal_steps_and_fedavg_does_not() -> None:
    """``Σ p_k/K_k D_k = 0``: a bias of the order of η K, where FedAvg's stays as η falls."""
    done, ends = (2, 8), {}
    for name in ("FedNova", "FedAvg"):
        for lr, rounds in ((0.1, 40), (0.01, 120)):
            (*_, ends[name, lr]) = path(name, 8, rounds, lr, budgets={0: done[0]})
            weights = [0.5 / k if name == "FedNova" else 0.5 for k in done]
            parts = [
                w * sgd_pull(a, lr, k) for w, a, k in zip(weights, CURVATURES, done, strict=True)
            ]
            expected = sum(p * c for p, c in zip(parts, CENTRES, strict=True)) / sum(parts)
            assert ends[name, lr] == pytest.approx(expected, abs=1e-4)
    assert abs(ends["FedNova", 0.01] - BEST) < 0.2 * abs(ends["FedNova", 0.1] - BEST)
    assert abs(ends["FedAvg", 0.01] - BEST) > 0.2


# limits of stability, a tenth below and above

BETA = 0.7
MOMENTUM: dict[str, tuple[str, dict[str, Any], float]] = {
    # method, settings, the largest stable η a of one local step
    "FedAvg": ("FedAvg", {}, 2.0),
    "FedADC": ("FedADC", {"beta": BETA}, 2 * (1 + BETA) / (1 + 2 * BETA)),  # Nesterov's
    "FedADC-heavy-ball": (
        "FedADC",
        {"beta": BETA, "variant": "heavy-ball"},
        2 * (1 + BETA),
    ),
    "SlowMo": ("SlowMo", {"beta": BETA, "alpha": 0.8}, 2 * (1 + BETA) / 0.8),
    # its step of one local step is that of the new m: heavy ball with η (1 − β)
    "MimeLite": ("MimeLite", {"beta": BETA}, 2 * (1 + BETA) / (1 - BETA)),
    "Mime": ("Mime", {"beta": BETA}, 2 * (1 + BETA) / (1 - BETA)),
}


@pytest.mark.parametrize("times", [0.9, 1.1])
@pytest.mark.parametrize("name", MOMENTUM)
def test_momentum_over_rounds_is_stable_below_its_limit(name: str, times: float) -> None:
    """One step a round: heavy ball is stable for ``η a < 2 (1 + β)``, Nesterov's form over ``1 + 2 β``."""
    method, settings, limit = MOMENTUM[name]
    models = path(method, 1, 60, times * limit, curvatures=[1.0], centres=[1.0], **settings)
    away = [abs(w - 1) for w in models]
    assert (max(away[-5:]) < 0.2 * max(away[:5])) == (times < 1)
    assert (max(away[-5:]) > 5 * max(away[:5])) == (times > 1)


@pytest.mark.parametrize("times", [0.5, 0.9, 1.5, 3.0])
def test_fedfors_force_stops_a_reversal_beyond_one_last_step(times: float) -> None:
    """A constant gradient that would undo the last step s in K steps; the first of them has no force.

    Its paper has no limit. Up to ``α (K − 1) = 1`` what is left of the reversal falls in proportion. Beyond
    it, nothing is left but the size of one force, α s.
    """
    k, lr, s = 20, 0.1, 0.5
    alpha = times / (k - 1)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    slope = s / (lr * k)  # K steps of it move by −s
    done = local_round(
        Point(),
        fr.FirstOrder(alpha),
        [(zero + slope, zero)],
        lr=lr,
        steps=k,
        loss_fn=lambda output, _: output.mean(),
        broadcast={"v": torch.tensor([-s / lr]).double()},  # the last step as a gradient
        device="cpu",
    )
    left = float(done.delta["v"][0])
    if times < 1:
        assert left == pytest.approx(-s * (1 - times), rel=1e-9)
    else:
        assert abs(left) <= alpha * s
