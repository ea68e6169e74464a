"""The FedExP oracle checked by itself: by hand, FedAvg, and the paper's two parallel lines."""

import numpy as np
import pytest

from tests.oracles.fedavg import fedavg
from tests.oracles.fedexp import fedexp
from tests.oracles.model import Params
from tests.oracles.quadratics import CLIENTS, START, slope, whole
from tests.oracles.test_efl import CLIENTS as PERCEPTRONS
from tests.oracles.test_efl import lr, minus, model, same, vector


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


@pytest.mark.parametrize("weighting", ["uniform", "num-examples"])
def test_it_is_fedavg_where_clients_agree_or_eps_is_large(weighting: str) -> None:
    want = fedavg(model(), PERCEPTRONS, 3, lr, 2, None, weighting)
    got = fedexp(model(), PERCEPTRONS, 3, lr, 2, None, weighting, eps=1e6)
    alone = fedexp(model(), PERCEPTRONS[:1], 3, lr, 2, None, weighting, eps=0.0)
    one = fedavg(model(), PERCEPTRONS[:1], 3, lr, 2, None, weighting)
    for a, b in [*zip(got, want, strict=True), *zip(alone, one, strict=True)]:
        assert np.allclose(vector(a), vector(b), rtol=0, atol=1e-12)
    # Nothing moves: no division of 0 by 0.
    assert same(fedexp(model(), PERCEPTRONS, 1, lambda t: 0.0, eps=0.0)[0], model())


def test_the_step_is_never_below_fedavgs_and_points_the_same_way() -> None:
    steps: list[float] = []
    averages: list[Params] = []
    got = fedexp(
        model(), PERCEPTRONS, 6, lr, 2, eps=0.0, server_steps=steps, averages=averages,
        cohorts=[[0, 1, 2], [0, 2], [1], [0, 1], [1, 2], [0, 2]],
        unused=[set(), set(), set(), {0}, set(), set()],
    )  # fmt: skip
    assert min(steps) == 1.0  # a client alone: 1/2
    assert steps[2] == steps[3] == 1.0
    before = [model(), *got[:-1]]
    for t, (a, b) in enumerate(zip(before, got, strict=True)):
        cohort = [[0, 1, 2], [0, 2], [1], [1], [1, 2], [0, 2]][t]
        mean = fedavg(
            a, [PERCEPTRONS[k] for k in cohort], 1, lambda _, t=t: lr(t + 1), 2, None, "uniform"
        )
        want = steps[t] * vector(minus(mean[0], a))
        assert np.allclose(vector(minus(b, a)), want, rtol=0, atol=1e-12)
        assert np.allclose(vector(averages[t]), (vector(a) + vector(b)) / 2, rtol=0, atol=1e-14)


def test_orthogonal_changes_step_as_far_as_half_the_number_of_clients() -> None:
    """M orthogonal changes of one length: sum |D_k|^2 / (2 M |D|^2) = M / 2."""
    number = 8
    clients = [[(np.array([float(k)]), np.array([1.0]))] for k in range(number)]

    def towards(w: Params, x: np.ndarray, y: np.ndarray) -> Params:
        g = np.zeros(number)
        g[int(x[0])] = w["v"][int(x[0])] - y[0]
        return {"v": g}

    steps: list[float] = []
    got = fedexp(
        {"v": np.zeros(number)},
        clients,
        1,
        lambda t: 1.0,
        eps=0.0,
        slope=towards,
        server_steps=steps,
    )
    assert steps == pytest.approx([number / 2])
    assert got[0]["v"] == pytest.approx(np.full(number, 0.5))


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
