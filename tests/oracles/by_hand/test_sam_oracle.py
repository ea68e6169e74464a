"""The oracles of FedSAM and FedLESAM checked by themselves: by hand, FedAvg, what is kept, sharpness."""

from typing import Any

import numpy as np
import pytest

from tests.oracles.client_step.sam import ahead, fedlesam, fedsam
from tests.oracles.model import gradient, loss
from tests.oracles.perceptron import CLIENTS as PERCEPTRONS
from tests.oracles.perceptron import minus, model, vector
from tests.oracles.quadratics import CLIENTS, START, slope, whole


def one(c: float) -> Any:
    """A client with the loss (v - c)^2/2."""
    return [(np.array([1.0]), np.array([c]))]


def test_fedsam_by_hand() -> None:
    """Losses (v - 1)^2/2 and (v - 4)^2/2, eta = 1/2, rho = 1/4, from 0: gradients at -0.25."""
    got = fedsam({"v": np.zeros(1)}, [one(1.0), one(4.0)], 1, lambda t: 0.5, rho=0.25, slope=slope)
    assert got[0]["v"] == pytest.approx([(1.25 + 4.25) / 4])
    # At a minimum there is nothing to go towards.
    still = fedsam({"v": np.array([1.0])}, [one(1.0)], 2, lambda t: 0.5, rho=0.25, slope=slope)
    assert [a["v"][0] for a in still] == [1.0, 1.0]


def test_fedlesam_by_hand() -> None:
    """One client, loss (v - 4)^2/2, eta = 1/4, rho = 1/2, two steps."""
    got = fedlesam({"v": np.zeros(1)}, [one(4.0)], 2, lambda t: 0.25, 1, 2, rho=0.5, slope=slope)
    # Round 1, plain: 1, 1.75. Round 2: d = 0 - 1.75, gradients at v - 0.5: v -= (v - 4.5)/4.
    assert got[0]["v"] == pytest.approx([1.75])
    assert got[1]["v"] == pytest.approx([1.75 + 2.75 * 0.4375])


def test_the_whole_loss_is_ascended() -> None:
    """A step is the gradient where f + mu/2 |v - w|^2 is, to first order, largest within rho."""
    x, y = PERCEPTRONS[0][0]
    w, rho, mu = model(), 1e-3, 0.9
    v = minus(
        w, {n: 0.1 * a for n, a in gradient(w, x, y).items()}
    )  # the first of two steps, rho = 0

    def objective(at: Any) -> float:
        return loss(at, x, y) + mu / 2 * float((vector(minus(at, w)) ** 2).sum())

    rng = np.random.default_rng(0)
    g = {n: a + mu * (v[n] - w[n]) for n, a in gradient(v, x, y).items()}
    top = ahead(v, rho, g)
    assert np.sqrt((vector(minus(top, v)) ** 2).sum()) == pytest.approx(rho)
    for _ in range(50):
        other = ahead(v, rho, {n: rng.normal(size=a.shape) for n, a in v.items()})
        assert objective(other) < objective(top)
    got = fedsam(w, [[(x, y)]], 1, lambda t: 0.1, 1, 2, rho=rho, mu=mu)[0]
    first = minus(
        w, {n: 0.1 * a for n, a in gradient(ahead(w, rho, gradient(w, x, y)), x, y).items()}
    )
    # The first step's penalty is mu times the perturbation.
    rise = minus(ahead(w, rho, gradient(w, x, y)), w)
    first = minus(first, {n: 0.1 * mu * a for n, a in rise.items()})
    g = {n: a + mu * (first[n] - w[n]) for n, a in gradient(first, x, y).items()}
    up = ahead(first, rho, g)
    step = {n: a + mu * (up[n] - w[n]) for n, a in gradient(up, x, y).items()}
    want = minus(first, {n: 0.1 * a for n, a in step.items()})
    assert np.allclose(vector(got), vector(want), rtol=0, atol=1e-14)


def test_where_fedsam_settles() -> None:
    """On a line, a client at v < c goes towards c + rho: sum pull_k (c_k + rho sign(c_k - w) - w) = 0."""
    data, eta, steps, rho = whole(CLIENTS), 0.05, 3, 0.2
    got = fedsam(START, data, 200, lambda t: eta, 1, steps, rho=rho, slope=slope)[-1]["v"][0]
    a = np.array([np.mean(x) for [(x, _)] in data])
    c = np.array([np.mean(x * y) for [(x, y)] in data]) / a
    pull = 1 - (1 - eta * a) ** steps
    plain = (pull * c).sum() / pull.sum()
    assert got == pytest.approx((pull * (c + rho * np.sign(c - got))).sum() / pull.sum(), abs=1e-10)
    assert abs(got - plain) > 1e-3
