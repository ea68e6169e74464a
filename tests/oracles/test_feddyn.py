"""The FedDyn oracle checked by itself: two steps by hand, its stationary point, and its sums."""

import numpy as np
import pytest

from tests.oracles.feddyn import feddyn
from tests.oracles.model import Params
from tests.oracles.quadratics import CLIENTS, START, minimum, slope, whole
from tests.oracles.test_efl import CLIENTS as PERCEPTRONS
from tests.oracles.test_efl import lr, model, same


def test_two_rounds_by_hand() -> None:
    """One example each, loss (v - c)^2/2 with c = 1 and 3, eta = 1/2, alpha = 1/2, one step, from 0."""
    clients = [[(np.array([1.0]), np.array([c]))] for c in (1.0, 3.0)]
    controls: list[tuple[Params, list[Params]]] = []
    cohorts = [[0, 1], [1]]
    got = feddyn(
        {"v": np.zeros(1)}, clients, 2, lambda t: 0.5, cohorts=cohorts, alpha=0.5, controls=controls,
        slope=slope,
    )  # fmt: skip
    # Round 1: v = 0.5, 1.5; h_k = -0.25, -0.75; h = -(0.5/2) 2 = -0.5; w = 1 + 0.5/0.5 = 2.
    assert got[0]["v"] == pytest.approx([2.0])
    # Round 2, client 1: gradient 2 - 3 + 0.75 = -0.25; v = 2.125; h = -0.5 - 0.25 0.125 = -0.53125.
    assert got[1]["v"] == pytest.approx([2.125 + 0.53125 / 0.5])
    assert [o["v"][0] for o in controls[1][1]] == pytest.approx([-0.25, -0.8125])


def test_it_settles_at_the_optimum_however_many_steps() -> None:
    """Also with two of three clients a round; h_k is then the client's gradient there, and h is 0."""
    for steps, cohorts in ((1, None), (7, None), (3, [[t % 3, (t + 1) % 3] for t in range(900)])):
        controls: list[tuple[Params, list[Params]]] = []
        rounds = 400 if cohorts is None else 900
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


def test_h_is_the_mean_of_h_k_whoever_falls_out() -> None:
    controls: list[tuple[Params, list[Params]]] = []
    options = {
        "cohorts": [[0, 2], [0, 1, 2], [1, 2], [0, 1]],
        "unused": [set(), {1}, set(), {0}],
        "steps_done": [{}, {2: 0}, {2: 1}, {}],
    }
    got = feddyn(model(), PERCEPTRONS, 4, lr, 2, alpha=0.3, controls=controls, **options)
    for h, own in controls:
        for n in h:
            assert np.allclose(h[n], sum(o[n] for o in own) / 3, rtol=0, atol=1e-14)
    same_used = feddyn(
        model(), PERCEPTRONS, 4, lr, 2, alpha=0.3, cohorts=[[0, 2], [0], [1, 2], [1]],
        steps_done=[{}, {}, {2: 1}, {}],
    )  # fmt: skip
    assert all(same(a, b) for a, b in zip(got, same_used, strict=True))


def test_a_lost_h_k_stays_in_h() -> None:
    controls: list[tuple[Params, list[Params]]] = []
    lost = [set[int](), {1}, set[int]()]
    feddyn(model(), PERCEPTRONS, 3, lr, alpha=0.3, controls=controls, lost=lost)
    whole_run: list[tuple[Params, list[Params]]] = []
    feddyn(model(), PERCEPTRONS, 3, lr, alpha=0.3, controls=whole_run)
    share = controls[0][1][1]["2.bias"] / 3
    for h, own in controls[1:]:
        mean = sum(o["2.bias"] for o in own) / 3
        assert np.allclose(h["2.bias"] - mean, share, rtol=0, atol=1e-14)
    assert abs(share).max() > 1e-4
    assert not same(whole_run[1][1][1], controls[1][1][1])
