"""The FedNova oracle checked by itself: a_k, special cases, and a fixed point that steps do not move."""

from typing import Any

import numpy as np
import pytest

from tests.oracles.fedavg import fedavg
from tests.oracles.fednova import counts, fednova
from tests.oracles.fedprox import fedprox
from tests.oracles.local_sgd import local_sgd
from tests.oracles.outside import Turn, nova
from tests.oracles.quadratics import CLIENTS, START, minimum, slope, whole
from tests.oracles.test_efl import CLIENTS as PERCEPTRONS
from tests.oracles.test_efl import lr, model, vector


def test_what_each_gradient_counts() -> None:
    """The papers' forms: (1 - rho^(tau-i))/(1 - rho), (1 - eta mu)^(tau-1-i), and their sums."""
    for steps in (1, 2, 7):
        assert counts(steps, 0.0, 0.0, 0.3) == pytest.approx([1.0] * steps)
        rho = 0.8
        a = counts(steps, rho, 0.0, 0.3)
        assert a == pytest.approx([(1 - rho ** (steps - i)) / (1 - rho) for i in range(steps)])
        assert sum(a) == pytest.approx((steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho))
        pulled = 0.3 * 0.9
        a = counts(steps, 0.0, 0.9, 0.3)
        assert a == pytest.approx([(1 - pulled) ** (steps - 1 - i) for i in range(steps)])
        assert sum(a) == pytest.approx((1 - (1 - pulled) ** steps) / pulled)


def alike(a: list[Any], b: list[Any]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(np.allclose(vector(x), vector(y), rtol=0, atol=1e-12) for x, y in pairs)


@pytest.mark.parametrize("weighting", ["uniform", "num-examples"])
def test_with_equal_steps_it_is_what_it_normalises(weighting: str) -> None:
    got = fednova(model(), PERCEPTRONS, 3, lr, 1, 4, weighting)
    assert alike(got, fedavg(model(), PERCEPTRONS, 3, lr, 1, 4, weighting))
    pulled = fednova(model(), PERCEPTRONS, 3, lr, 1, 4, weighting, mu=0.9)
    assert alike(pulled, fedprox(model(), PERCEPTRONS, 3, lr, 1, 4, weighting, mu=0.9))
    assert not alike(pulled, got)
    alone = [PERCEPTRONS[0]]
    heavy = fednova(model(), alone, 3, lambda t: 0.2, 2, momentum=0.7)
    assert alike(heavy, local_sgd(model(), alone, 3, 0.2, 2, momentum=0.7)[0])


def test_unequal_steps_as_in_the_plain_loop() -> None:
    turns = [[Turn(0, 3, "used"), Turn(1, 5, "unused"), Turn(2, 1, "used")], [Turn(1, 2, "used")]]
    got = fednova(
        model(), PERCEPTRONS, 2, lambda t: 0.2, 1, 6, cohorts=[[0, 1, 2], [1]], unused=[{1}, set()],
        steps_done=[{0: 3, 1: 5, 2: 1}, {1: 2}],
    )  # fmt: skip
    assert alike(got, nova(model(), PERCEPTRONS, turns, 0.2, "num-examples").models)


@pytest.mark.parametrize("own", [{}, {"momentum": 0.6}, {"mu": 0.5}])
def test_unequal_steps_do_not_move_where_it_settles(own: dict[str, float]) -> None:
    """As eta goes to 0: the optimum of sum p_k f_k; FedAvg's is that of sum p_k s_k f_k."""
    n = [3, 4, 2]
    p, eta = [n_k / sum(n) for n_k in n], 1e-3
    steps = {0: 1, 1: 3, 2: 8}
    got = fednova(
        START,
        whole(CLIENTS),
        1500,
        lambda t: eta,
        1,
        8,
        steps_done=[steps] * 1500,
        slope=slope,
        **own,
    )
    best = minimum(CLIENTS, p)
    assert got[-1]["v"] == pytest.approx([best], abs=0.05)
    assert (
        abs(minimum(CLIENTS, [p_k * s for p_k, s in zip(p, steps.values(), strict=True)]) - best)
        > 1
    )


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="not both"):
        fednova(model(), PERCEPTRONS, 1, lr, momentum=0.5, mu=0.5)
    with pytest.raises(ValueError, match="eta mu"):
        fednova(model(), PERCEPTRONS, 1, lr, mu=5.0)
