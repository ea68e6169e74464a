"""The oracles of Mime and MimeLite checked by themselves: by hand, special cases, and fixed points."""

import numpy as np
import pytest

from tests.oracles.client_step.mime import mime, mimelite
from tests.oracles.model import Params
from tests.oracles.quadratics import CLIENTS, START, minimum, slope, whole


def test_two_rounds_by_hand() -> None:
    """Losses v^2/2 and (v - 3)^2, eta = 1/2, beta = 1/2, two steps, from 0."""
    clients = [[(np.array([a]), np.array([c]))] for a, c in ((1.0, 0.0), (2.0, 3.0))]
    start = {"v": np.zeros(1)}
    controls: list[tuple[Params, Params]] = []
    got = mime(
        start, clients, 2, lambda t: 0.5, 1, 2, beta=0.5, controls=controls, slope=slope
    )  # fmt: skip
    # Round 1: c = (0 - 6)/2 = -3. v -= (a v + c)/4, from 0: 0.75, then
    # client 0: 0.75 + 2.25/4 = 1.3125; client 1: 0.75 + (3 - 1.5)/4 = 1.125.
    assert got[0]["v"] == pytest.approx([1.21875])
    assert [part["v"][0] for part in controls[0]] == pytest.approx([-3.0, -1.5])
    # Round 2: c = (1.21875 + 2 (1.21875 - 3))/2 = -1.171875; v -= (a (v - w) + c)/4 - 1.5/4.
    first = (1.171875 + 1.5) / 4
    ends = [first + first - a * first / 4 for a in (1.0, 2.0)]
    assert got[1]["v"] == pytest.approx([1.21875 + sum(ends) / 2])
    lite = mimelite(start, clients, 2, lambda t: 0.5, 1, 2, beta=0.5, slope=slope)
    # Client 1: v -= 2 (v - 3)/4: 1.5, then 2.25. Client 0 stays.
    assert lite[0]["v"] == pytest.approx([1.125])
    # c = -3, m = -1.5; client 0: v -= v/4 - 1.5/4; client 1: v -= (v - 3)/2 - 1.5/4.
    v_0 = v_1 = 1.125
    for _ in range(2):
        v_0, v_1 = v_0 - v_0 / 4 + 0.375, v_1 - (v_1 - 3) / 2 + 0.375
    assert lite[1]["v"] == pytest.approx([(v_0 + v_1) / 2])


def test_one_step_a_round_is_heavy_ball() -> None:
    """Mime: ``w -= eta ((1 - beta) c + beta m)`` is SGD with dampened momentum on the whole loss."""
    v, m = START["v"][0], 0.0
    for model_after in mime(START, CLIENTS, 6, lambda t: 0.2, 1, 1, beta=0.7, slope=slope):
        c = float(np.mean([slope({"v": np.array([v])}, *b[0])["v"] for b in whole(CLIENTS)]))
        m = 0.3 * c + 0.7 * m
        v -= 0.2 * m
        assert model_after["v"] == pytest.approx([v])


def test_mime_settles_at_the_optimum_and_mimelite_beside_it() -> None:
    """With whole batches. MimeLite: ``sum (1 - (1 - r_k)^K)(u_k - w) = 0``, r_k = eta (1 - beta) a_k,
    u_k = c_k - beta m/((1 - beta) a_k), m = mean a_k (w - c_k): each client's K steps towards u_k.
    """
    clients, eta, steps, beta = whole(CLIENTS), 0.1, 4, 0.6
    best = minimum(CLIENTS, [1 / 3] * 3)
    exact, lite = (
        m(START, clients, 300, lambda t: eta, 1, steps, beta=beta, slope=slope)[-1]["v"][0]
        for m in (mime, mimelite)
    )
    assert exact == pytest.approx(best, abs=1e-10)
    a = [float(np.mean(x)) for [(x, _)] in clients]
    b = [float(np.mean(x * y)) for [(x, y)] in clients]  # a_k c_k
    pull = [1 - (1 - eta * (1 - beta) * a_k) ** steps for a_k in a]
    left = right = 0.0  # the equation as left w = right
    for a_k, b_k, q in zip(a, b, pull, strict=True):
        follow = beta / ((1 - beta) * a_k)
        right += q * (b_k / a_k + follow * float(np.mean(b)))
        left += q * (1 + follow * float(np.mean(a)))
    assert lite == pytest.approx(right / left, abs=1e-10)
    assert abs(lite - best) > 0.01
