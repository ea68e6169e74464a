"""The FedCM oracle checked by itself: by hand, FedAvg, a momentum of the rounds, and where it settles."""

import numpy as np
import pytest

from tests.oracles.client_step.fedcm import fedcm
from tests.oracles.perceptron import minus
from tests.oracles.quadratics import CLIENTS, START, slope, whole


def test_two_rounds_by_hand() -> None:
    """Losses v^2/2 and (v - 2)^2/2, eta = 1/2 then 1/4, alpha = 1/2; client 1 takes two steps; from 0."""
    clients = [[(np.array([1.0]), np.array([c]))] for c in (0.0, 2.0)]
    run = ({"v": np.zeros(1)}, clients, 2, lambda t: 0.5**t, 1, 2)
    got = fedcm(*run, alpha=0.5, slope=slope, steps_done=[{0: 1}, {0: 1}])
    # Round 1: v = 0 and 1, then 1.5: w = 0.75. The step as a gradient: -0.75/0.5 = -1.5.
    assert got[0]["v"] == pytest.approx([0.75])
    # Round 2: v_0 = 0.75 - (0.375 - 0.75)/4; v_1 -= (0.5 (v - 2) - 0.375)/4 twice: 1, 1.21875.
    assert got[1]["v"] == pytest.approx([(0.84375 + 1.21875) / 2])
    planned = fedcm(*run, alpha=0.5, slope=slope, steps_done=[{0: 1}, {0: 1}], divisor="planned")
    assert planned[1]["v"] == pytest.approx(
        [(0.75 + 1.21875) / 2]
    )  # v_0 = 0.75 - (0.375 - 0.375)/4
    paper = fedcm(*run, alpha=0.5, slope=slope, steps_done=[{0: 1}, {0: 1}], first_round="paper")
    # Half the gradient: v_1 -= (v - 2)/4 twice: 0.5, 0.875.
    assert paper[0]["v"] == pytest.approx([0.4375])


def test_without_gradients_a_rounds_step_goes_on() -> None:
    """K_k steps of D_t are one global step times 1 - alpha, whatever K_k, and eta over the last eta."""
    for rate in (lambda t: 0.3, lambda t: 0.3 * 0.5**t):
        flat = [0]

        def vanishing(
            w: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray, left: list[int] = flat
        ) -> dict[str, np.ndarray]:
            left[0] += 1
            return {"v": np.array([1.0 if left[0] <= 6 else 0.0])}  # the six steps of round 1

        got = fedcm(START, CLIENTS, 3, rate, alpha=0.4, slope=vanishing)
        moves = [float(minus(a, b)["v"][0]) for a, b in zip(got, [START, *got], strict=False)]
        for t in (1, 2):
            assert moves[t] == pytest.approx(0.6 * rate(t + 1) / rate(t) * moves[t - 1])


def test_it_settles_where_fedavg_with_alphas_rate_does() -> None:
    """There the last step is 0, and v -= eta alpha grad f."""
    data = whole(CLIENTS)
    got = fedcm(START, data, 250, lambda t: 0.2, 1, 5, alpha=0.3, slope=slope)[-1]["v"]
    slow = fedcm(START, data, 250, lambda t: 0.06, 1, 5, alpha=1.0, slope=slope)[-1]["v"]
    fast = fedcm(START, data, 250, lambda t: 0.2, 1, 5, alpha=1.0, slope=slope)[-1]["v"]
    assert got == pytest.approx(slow, abs=1e-10)
    assert abs(got - fast) > 0.05
    # sum (1 - (1 - eta alpha a)^K)(c - w) = 0
    a = np.array([np.mean(x) for [(x, _)] in data])
    c = np.array([np.mean(x * y) for [(x, y)] in data]) / a
    pull = 1 - (1 - 0.06 * a) ** 5
    assert got == pytest.approx([(pull * c).sum() / pull.sum()], abs=1e-10)
