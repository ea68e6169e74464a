"""The oracles of Mime and MimeLite checked by themselves: by hand, special cases, and fixed points."""

from typing import Any

import numpy as np
import pytest

from tests.oracles.fedavg import fedavg
from tests.oracles.mime import mime, mimelite
from tests.oracles.model import Params, gradient
from tests.oracles.quadratics import CLIENTS, START, minimum, slope, whole
from tests.oracles.test_efl import CLIENTS as PERCEPTRONS
from tests.oracles.test_efl import lr, minus, model, same, vector


def alike(a: Params, b: Params, tolerance: float = 1e-12) -> bool:
    return np.allclose(vector(a), vector(b), rtol=0, atol=tolerance)


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


@pytest.mark.parametrize("weighting", ["uniform", "num-examples"])
def test_special_cases(weighting: str) -> None:
    options: dict[str, Any] = {"weighting": weighting}
    # MimeLite without momentum is FedAvg.
    lite = mimelite(model(), PERCEPTRONS, 3, lr, 2, beta=0.0, **options)
    average = fedavg(model(), PERCEPTRONS, 3, lr, 2, None, weighting)
    assert all(alike(a, b) for a, b in zip(lite, average, strict=True))
    # Mime without momentum and with one step is a step down the whole loss, whatever the batch.
    got = mime(model(), PERCEPTRONS, 1, lr, 1, 1, beta=0.0, **options)[0]
    step = np.zeros_like(vector(model()))
    sizes = [sum(len(y) for _, y in client) for client in PERCEPTRONS]
    for client, n in zip(PERCEPTRONS, sizes, strict=True):
        x, y = (np.concatenate(part) for part in zip(*client, strict=True))
        share = 1 / 3 if weighting == "uniform" else n / sum(sizes)
        step = step - lr(1) * share * vector(gradient(model(), x, y))
    assert np.allclose(vector(minus(got, model())), step, rtol=0, atol=1e-14)
    # A client alone, on its whole data: both are the same.
    alone = whole(PERCEPTRONS)[:1]
    pair = [m(model(), alone, 3, lr, 3, beta=0.6) for m in (mime, mimelite)]
    assert all(alike(a, b) for a, b in zip(*pair, strict=True))


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
        m(START, clients, 600, lambda t: eta, 1, steps, beta=beta, slope=slope)[-1]["v"][0]
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


def test_who_counts_in_c() -> None:
    """Mime's c has all that answered first; MimeLite's those whose reply is used."""
    for m, told in ((mime, [0, 1, 2]), (mimelite, [0, 2])):
        controls: list[tuple[Params, Params]] = []
        m(model(), PERCEPTRONS, 1, lr, beta=0.5, controls=controls, unused=[{1}])
        c, momentum = controls[0]
        want = np.zeros_like(vector(c))
        for k in told:
            x, y = (np.concatenate(part) for part in zip(*PERCEPTRONS[k], strict=True))
            want = want + vector(gradient(model(), x, y)) / len(told)
        assert np.allclose(vector(c), want, rtol=0, atol=1e-14)
        assert np.allclose(vector(momentum), want / 2, rtol=0, atol=1e-14)
    cut: dict[str, Any] = {"beta": 0.5, "steps_done": [{}, {1: 0, 0: 2}]}
    inactive = mimelite(model(), PERCEPTRONS, 2, lr, 2, **cut)
    absent = mimelite(model(), PERCEPTRONS, 2, lr, 2, cohorts=[[0, 1, 2], [0, 2]], **cut)
    assert same(inactive[1], absent[1])
