"""The FedNova oracle checked by itself: a_k, special cases, and a fixed point that steps do not move."""

import pytest

from tests.oracles.quadratics import CLIENTS, START, minimum, slope, whole
from tests.oracles.server_step.fednova import counts, fednova


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


@pytest.mark.parametrize("own", [{}, {"momentum": 0.6}, {"mu": 0.5}])
def test_unequal_steps_do_not_move_where_it_settles(own: dict[str, float]) -> None:
    """As eta goes to 0: the optimum of sum p_k f_k; FedAvg's is that of sum p_k s_k f_k."""
    n = [3, 4, 2]
    p, eta = [n_k / sum(n) for n_k in n], 4e-3
    steps = {0: 1, 1: 3, 2: 8}
    got = fednova(
        START,
        whole(CLIENTS),
        350,
        lambda t: eta,
        1,
        8,
        steps_done=[steps] * 350,
        slope=slope,
        **own,
    )
    best = minimum(CLIENTS, p)
    assert got[-1]["v"] == pytest.approx([best], abs=0.15)
    assert (
        abs(minimum(CLIENTS, [p_k * s for p_k, s in zip(p, steps.values(), strict=True)]) - best)
        > 1
    )
