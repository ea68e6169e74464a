"""Implicit steps of quadratic pulls: what they solve, their stability, and when a warning asks for them."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from flwr_regs import (
    EFL,
    Curvature,
    EFLClient,
    Elastic,
    EmbeddedMomentum,
    FedCurv,
    FedCurvClient,
    FedProx,
    FedProxClient,
    Proximal,
    RoundFailed,
)
from flwr_regs.chain import chain
from flwr_regs.term import ClientContext, Term
from tests.conftest import make_clients, run

LR, LAM = 0.1, 30.0
V = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)
GRAD = torch.tensor([0.3, -2.0, 0.1], dtype=torch.float64)
START = torch.tensor([1.0, 0.5, 2.5], dtype=torch.float64)
U = torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64)
MEANS = torch.tensor([0.7, 2.0, 0.0], dtype=torch.float64)
OWN = torch.tensor([0.25, 1.0, 0.0], dtype=torch.float64)
M = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)

SLOTS: dict[str, Any] = {
    "elastic": {"U.w": U, "V.w": MEANS},
    "fedcurv": {"U.w": U, "V.w": MEANS, "used": torch.tensor(True)},
    "fedadc": {"w": M},
}


def step(*terms: Term) -> torch.Tensor:
    """A step of SGD from V, with GRAD, of several terms."""
    ctx = ClientContext(
        start={"w": START},
        lr=LR,
        num_steps=5,
        broadcast=SLOTS,
        client={"fedcurv": {"U.w": OWN, "V.w": OWN * 0.3}},
    )
    return V - LR * chain(terms).correct({"w": GRAD}, {"w": V}, ctx)["w"]  # type: ignore[no-any-return]


def pull(name: str, v: torch.Tensor) -> torch.Tensor:
    """The gradient of a term's penalty at v."""
    if name == "proximal":
        return LAM * (v - START)
    if name == "elastic":
        return LAM * (U * v - MEANS)
    return 2 * LAM * ((U - OWN) * v - (MEANS - OWN * 0.3))


TERMS = [
    Proximal(LAM, implicit=True),
    Elastic(LAM, implicit=True),
    Curvature(LAM, implicit=True),
]


@pytest.mark.parametrize("term", TERMS, ids=lambda t: t.name)
def test_the_step_solves_the_implicit_equation(term: Term) -> None:
    """v' = v − η (∇f(v) + pull(v')), the pull at the step's end."""
    new = step(term)
    torch.testing.assert_close(new, V - LR * (GRAD + pull(term.name, new)))
    explicit = type(term)(LAM)  # type: ignore[call-arg]
    torch.testing.assert_close(step(explicit), V - LR * (GRAD + pull(term.name, V)))


@pytest.mark.parametrize("term", TERMS, ids=lambda t: t.name)
def test_it_is_exact_right_of_fedadcs_momentum(term: Term) -> None:
    new = step(EmbeddedMomentum(0.6, 0.6), term)
    torch.testing.assert_close(new, V - LR * (GRAD + 0.6 * M / 5 + pull(term.name, new)))


METHODS = [
    (EFL, EFLClient, 100.0),
    (FedCurv, FedCurvClient, 100.0),
    (FedProx, FedProxClient, 100.0),
]


@pytest.mark.parametrize(("strategy", "client", "lam"), METHODS, ids=lambda x: str(x))
def test_a_strong_pull_diverges_explicitly_and_is_finite_implicitly(
    strategy: Any, client: Any, lam: float
) -> None:
    def train(**settings: Any) -> dict[str, np.ndarray]:
        made = strategy(lam, seed=3, fraction_evaluate=0.0, **settings)
        data = make_clients()
        return run(made, client, rounds=6, clients=data, lr=0.5, train={"local-steps": 60})

    with pytest.raises(RoundFailed, match=r"NaN|beyond"):
        train()
    assert all(np.abs(a).max() < 10 for a in train(implicit=True).values())


# The warning


def warnings_of(caplog: pytest.LogCaptureFixture, strategy: Any, client: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="flwr"):
        run(strategy, client, rounds=5, lr=0.2, train={"local-steps": 1})
    return [r.getMessage() for r in caplog.records if "implicit=True" in r.getMessage()]


@pytest.mark.parametrize(("strategy", "client"), [(EFL, EFLClient), (FedCurv, FedCurvClient)])
def test_a_strength_beyond_stability_is_named_once_in_a_training(
    strategy: Any, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"seed": 3, "fraction_evaluate": 0.0}
    loud = strategy(60.0, **options)
    for _ in range(2):  # a second training says it again
        (said,) = warnings_of(caplog, loud, client)
    first = strategy(0.0001, **options)
    run(first, client, rounds=1, lr=0.2, train={"local-steps": 1})
    slot = next(s for s in first.training.model.server.values() if s)
    largest = max(a.max() for key, a in slot.items() if key.startswith("U."))
    times = 1 if strategy is EFL else 2
    assert f"only up to lam={2 / (0.2 * times * largest):.3g} " in said
    assert warnings_of(caplog, strategy(60.0, implicit=True, **options), client) == []
    quiet = 0.1 * 2 / float(0.2 * times * largest)
    assert warnings_of(caplog, strategy(quiet, **options), client) == []


def test_fedprox_names_a_strength_beyond_stability_too(caplog: pytest.LogCaptureFixture) -> None:
    """η = 0.2: stable below μ = 10."""
    options = {"seed": 3, "fraction_evaluate": 0.0}
    for _ in range(2):
        (said,) = warnings_of(caplog, FedProx(10.1, **options), FedProxClient)
        assert "has mu=10.1, but its explicit steps are stable only up to mu=10 " in said
    assert warnings_of(caplog, FedProx(10.1, implicit=True, **options), FedProxClient) == []
    assert warnings_of(caplog, FedProx(9.9, **options), FedProxClient) == []
