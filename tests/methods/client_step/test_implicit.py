"""Implicit steps of quadratic pulls: their stability, and when a warning asks for them."""

import logging
from typing import Any

import numpy as np
import pytest

import flwr_regs as fr
from tests.conftest import QUIET, Log, make_clients, run


@pytest.mark.parametrize(
    ("strategy", "client"),
    [(fr.EFL, fr.EFLClient), (fr.FedCurv, fr.FedCurvClient), (fr.FedProx, fr.FedProxClient)],
)
def test_a_strong_pull_diverges_unless_it_is_implicit(strategy: Any, client: Any) -> None:
    def train(**settings: Any) -> dict[str, np.ndarray]:
        made = strategy(100.0, seed=3, fraction_evaluate=0.0, **settings)
        data = make_clients()
        return run(made, client, rounds=6, clients=data, lr=0.5, train={"local-steps": 60})

    with pytest.raises(fr.RoundFailed, match=r"NaN|beyond"):
        train()
    assert all(np.abs(a).max() < 10 for a in train(implicit=True).values())


# The warning


def warnings_of(log: Log, strategy: Any, client: Any) -> list[str]:
    run(strategy, client, rounds=5, lr=0.2, train={"local-steps": 1})
    return log("implicit=True", logging.WARNING)


@pytest.mark.parametrize(("strategy", "times"), [(fr.EFL, 1), (fr.FedCurv, 2), (fr.FedProx, 0)])
def test_a_strength_beyond_stability_is_named_once(strategy: Any, times: int, log: Log) -> None:
    """η = 0.2: stable below λ = 10/(times · largest curvature); FedProx below μ = 10."""
    limit, client = 10.0, getattr(fr, f"{strategy.__name__}Client")
    if times:
        first = strategy(0.0001, **QUIET)
        run(first, client, rounds=1, lr=0.2, train={"local-steps": 1})
        slot = next(s for s in first.training.model.server.values() if s)
        largest = max(a.max() for key, a in slot.items() if key.startswith("U."))
        limit = 2 / (0.2 * times * float(largest))
    strength = 1.01 * limit if not times else 60.0
    loud = strategy(strength, **QUIET)
    for _ in range(2):  # a second training says it again
        (said,) = warnings_of(log, loud, client)
        assert f"only up to {'lam' if times else 'mu'}={limit:.3g} " in said
    assert warnings_of(log, strategy(strength, implicit=True, **QUIET), client) == []
    quiet = 0.1 * limit if times else 0.99 * limit
    assert warnings_of(log, strategy(quiet, **QUIET), client) == []
