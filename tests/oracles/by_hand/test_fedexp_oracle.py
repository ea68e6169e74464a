"""The FedExP oracle checked by itself: by hand, FedAvg, and the paper's two parallel lines."""

import numpy as np
import pytest

from tests.oracles.model import Params
from tests.oracles.quadratics import CLIENTS, START, slope, whole
from tests.oracles.server_step.fedexp import fedexp


def test_a_round_by_hand() -> None:
    """Losses (v - 5)^2/2 and (v + 3)^2/2, eta = 1/2, from 0: changes 2.5 and -1.5, mean 0.5."""
    clients = [[(np.array([1.0]), np.array([c]))] for c in (5.0, -3.0)]
    steps: list[float] = []
    averages: list[Params] = []
    got = fedexp(
        {"v": np.zeros(1)}, clients, 1, lambda t: 0.5, eps=0.1, slope=slope, server_steps=steps,
        averages=averages,
    )  # fmt: skip
    eta_g = (6.25 + 2.25) / (2 * 2 * (0.25 + 0.1))
    assert steps == pytest.approx([eta_g])
    assert got[0]["v"] == pytest.approx([eta_g / 2])
    assert averages[0]["v"] == pytest.approx([eta_g / 4])


def test_where_it_settles() -> None:
    """Where the mean change is 0, FedAvg's fixed point, if eps holds the step within stability.

    Without eps, the step grows there without bound: it comes no nearer.
    """
    data = whole(CLIENTS)
    average = fedexp(START, data, 500, lambda t: 0.05, 1, 2, eps=1e9, slope=slope)[-1]["v"][0]
    steps: list[float] = []
    calm = fedexp(START, data, 500, lambda t: 0.05, 1, 2, eps=0.05, slope=slope, server_steps=steps)
    assert steps[-1] > 1.5
    assert calm[-1]["v"] == pytest.approx([average], abs=1e-9)
    wild = fedexp(START, data, 500, lambda t: 0.05, 1, 2, eps=0.0, slope=slope)
    assert max(abs(a["v"][0] - average) for a in wild[-50:]) > 0.1
