"""The q-FedAvg oracle checked by itself: by hand, FedAvg at q = 0, the paper's objective, its floor."""

from typing import Any

import numpy as np
import pytest

from tests.oracles.model import Params
from tests.oracles.quadratics import CLIENTS, START, slope, whole
from tests.oracles.server_step.qfedavg import qfedavg


def height(w: Params, x: np.ndarray, y: np.ndarray) -> float:
    """The mean of a/2 (v - c)^2 over a batch, and 1: no loss is 0."""
    return 1.0 + float(np.mean(x * (w["v"][0] - y) ** 2)) / 2


def test_a_round_by_hand() -> None:
    """Losses v^2/2 + 1 and (v - 2)^2/2 + 1, eta = 1/2, q = 2, one step from 0."""
    clients = [[(np.array([1.0]), np.array([c]))] for c in (0.0, 2.0)]
    losses: list[dict[int, float]] = []
    got = qfedavg(
        {"v": np.zeros(1)},
        clients,
        1,
        lambda t: 0.5,
        q=2.0,
        slope=slope,
        height=height,
        losses=losses,
    )
    # F = 1, 3; v = 0, 1; Dw = 0, -2. h = 0 + 2 and 2 3 4 + 2 9 = 42; D = 0 and 9 (-2) = -18.
    assert losses == [{0: 1.0, 1: 3.0}]
    assert got[0]["v"] == pytest.approx([18 / 44])


@pytest.mark.parametrize("q", [1.0, 3.0])
def test_one_step_a_round_minimises_the_papers_objective(q: float) -> None:
    """q-FedSGD: ``sum F_k^(q+1)/(q+1)`` is least where ``sum F_k^q grad F_k = 0``."""
    options: dict[str, Any] = {"slope": slope, "height": height, "q": q}
    v = qfedavg(START, whole(CLIENTS), 800, lambda t: 0.5, 1, 1, **options)[-1]

    def slack(at: float) -> float:
        w, total = {"v": np.array([at])}, 0.0
        for [(x, y)] in whole(CLIENTS):
            total += height(w, x, y) ** (q + 1) / (q + 1)
        return total

    pulls = [height(v, x, y) ** q * slope(v, x, y)["v"][0] for [(x, y)] in whole(CLIENTS)]
    assert abs(sum(pulls)) < 1e-8 * max(np.abs(pulls))
    best = slack(v["v"][0])
    grid = v["v"][0] + np.linspace(-3, 3, 61)
    assert all(slack(at) >= best for at in grid)
    # A larger q leaves the worst client better off than plain averaging does.
    average = qfedavg(START, whole(CLIENTS), 400, lambda t: 0.1, 1, 1, **{**options, "q": 0.0})[-1]
    worst = [max(height(w, x, y) for [(x, y)] in whole(CLIENTS)) for w in (v, average)]
    assert worst[0] < worst[1]


def test_a_loss_of_0_has_a_floor_below_q_1() -> None:
    """Else F^(q-1) is infinite: such a client hardly counts, and nothing is NaN."""
    clients = [[(np.array([1.0]), np.array([c]))] for c in (0.0, 2.0)]

    def own(w: Params, x: np.ndarray, y: np.ndarray) -> float:
        return height(w, x, y) - 1.0

    got = qfedavg({"v": np.zeros(1)}, clients, 1, lambda t: 0.5, q=0.5, slope=slope, height=own)
    # Client 0: F = 1e-12, Dw = 0, h = 2e-6. Client 1: F = 2, Dw = -2, h = 0.5 4/sqrt 2 + 2 sqrt 2.
    assert got[0]["v"] == pytest.approx([2 * 2**0.5 / (2e-6 + 3 * 2**0.5)], rel=1e-9)
