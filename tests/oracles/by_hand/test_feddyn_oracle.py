"""The FedDyn oracle checked by itself: two steps by hand, its stationary point, and its sums."""

import numpy as np
import pytest

from tests.oracles.client_step.feddyn import feddyn
from tests.oracles.model import Params
from tests.oracles.quadratics import CLIENTS, START, minimum, slope, whole


def test_two_rounds_by_hand() -> None:
    """One example each, loss (v - c)^2/2 with c = 1 and 3, eta = 1/2, alpha = 1/2, from 0."""
    clients = [[(np.array([1.0]), np.array([c]))] for c in (1.0, 3.0)]
    controls: list[tuple[Params, list[Params]]] = []
    cohorts = [[0, 1], [1]]
    got = feddyn(
        {"v": np.zeros(1)}, clients, 2, lambda t: 0.5, 1, 2, cohorts=cohorts, alpha=0.5, controls=controls,
        slope=slope, steps_done=[{0: 1, 1: 1}, {}],
    )  # fmt: skip
    # Round 1, one step: v = 0.5, 1.5; h_k = -0.25, -0.75; h = -(0.5/2) 2 = -0.5; w = 1 + 0.5/0.5 = 2.
    assert got[0]["v"] == pytest.approx([2.0])
    # Round 2, client 1: gradient 2 - 3 + 0.75; v = 2.125; then 2.125 - 3 + 0.75 + 0.125/2;
    # v = 2.15625; h = -0.5 - 0.25 0.15625 = -0.5390625.
    assert got[1]["v"] == pytest.approx([2.15625 + 0.5390625 / 0.5])
    assert [o["v"][0] for o in controls[1][1]] == pytest.approx([-0.25, -0.828125])


def test_it_settles_at_the_optimum_however_many_steps() -> None:
    """Also with two of three clients a round; h_k is then the client's gradient there, and h is 0."""
    for steps, cohorts in ((1, None), (7, None), (3, [[t % 3, (t + 1) % 3] for t in range(900)])):
        controls: list[tuple[Params, list[Params]]] = []
        rounds = 250 if cohorts is None else 900
        got = feddyn(
            START, whole(CLIENTS), rounds, lambda t: 0.1, 1, steps,
            cohorts=None if cohorts is None else [sorted(c) for c in cohorts],
            alpha=0.8, controls=controls, slope=slope,
        )  # fmt: skip
        best = minimum(CLIENTS, [1 / 3] * 3)
        assert got[-1]["v"] == pytest.approx([best], abs=1e-9)
        h, own = controls[-1]
        assert h["v"] == pytest.approx([0.0], abs=1e-9)
        for h_k, [(x, y)] in zip(own, whole(CLIENTS), strict=True):
            assert h_k["v"] == pytest.approx(slope(got[-1], x, y)["v"], abs=1e-8)
