"""The oracles of VRL-SGD and FedGATE checked by themselves: SCAFFOLD, by hand, and where they settle."""

import numpy as np
import pytest

from tests.oracles.fedavg import fedavg
from tests.oracles.gate import fedgate, vrlsgd
from tests.oracles.model import Params
from tests.oracles.quadratics import CLIENTS, START, minimum, slope, whole
from tests.oracles.scaffold import scaffold
from tests.oracles.test_efl import CLIENTS as PERCEPTRONS
from tests.oracles.test_efl import lr, model, same, vector


def apart(a: Params, b: Params) -> float:
    return float(np.abs(vector(a) - vector(b)).max())


@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_with_everyone_and_equal_steps_it_is_scaffold(server_lr: float) -> None:
    """The server's own step size too: c_k - c is d_k."""
    seen: list[tuple[Params, list[Params]]] = []
    own: list[list[Params]] = []
    got = fedgate(model(), PERCEPTRONS, 5, lr, 1, 4, server_lr=server_lr, controls=own)
    want = scaffold(model(), PERCEPTRONS, 5, lr, 1, 4, server_lr=server_lr, controls=seen)
    assert all(apart(a, b) < 1e-12 for a, b in zip(got, want, strict=True))
    for d, (c, each) in zip(own, seen, strict=True):
        for d_k, c_k in zip(d, each, strict=True):
            assert apart(d_k, {n: c_k[n] - c[n] for n in c}) < 1e-12
    assert apart(got[1], fedavg(model(), PERCEPTRONS, 5, lr, 1, 4, "uniform")[1]) > 1e-3
    some = vrlsgd(model(), PERCEPTRONS, 4, lr, 1, 4, cohorts=[[0, 1], [1, 2], [0, 2], [0, 1]])
    other = scaffold(model(), PERCEPTRONS, 4, lr, 1, 4, cohorts=[[0, 1], [1, 2], [0, 2], [0, 1]])
    assert apart(some[0], other[0]) < 1e-12
    assert apart(some[3], other[3]) > 1e-3


def test_two_rounds_by_hand() -> None:
    """Losses v^2/2 and (v - 2)^2/2, eta = 1/2, client 1 takes two steps, gamma = 1/2, from 0."""
    clients = [[(np.array([1.0]), np.array([c]))] for c in (0.0, 2.0)]
    own: list[list[Params]] = []
    got = fedgate(
        {"v": np.zeros(1)}, clients, 2, lambda t: 0.5, 1, 2, server_lr=0.5, controls=own, slope=slope,
        steps_done=[{0: 1}, {0: 1}],
    )  # fmt: skip
    # Round 1: v = 0 and 1, then 1.5; mean 0.75, w = 0.375. d_0 = 0.75/0.5, d_1 = -0.75/(2 0.5).
    assert got[0]["v"] == pytest.approx([0.375])
    assert [d["v"][0] for d in own[0]] == pytest.approx([1.5, -0.75])
    # Round 2: v_0 = 0.375 - (0.375 - 1.5)/2; v_1 -= (v - 2 + 0.75)/2 twice: 0.8125, 1.03125.
    assert got[1]["v"] == pytest.approx([0.375 + ((0.9375 + 1.03125) / 2 - 0.375) / 2])
    # mean 0.984375; d_0 += 0.046875/0.5, d_1 -= 0.046875
    assert [d["v"][0] for d in own[1]] == pytest.approx([1.59375, -0.796875])


def test_it_settles_at_the_optimum_however_many_steps() -> None:
    """Of the weighted loss, where all clients take part; d_k is then the client's gradient there."""
    n = np.array([3, 4, 2])
    for weighting, p in (("uniform", [1 / 3] * 3), ("num-examples", list(n / n.sum()))):
        for steps in (1, 6):
            own: list[list[Params]] = []
            got = fedgate(
                START, whole(CLIENTS), 600, lambda t: 0.05, 1, steps, weighting, server_lr=0.8,
                controls=own, slope=slope,
            )  # fmt: skip
            assert got[-1]["v"] == pytest.approx([minimum(CLIENTS, p)], abs=1e-9)
            for d_k, [(x, y)] in zip(own[-1], whole(CLIENTS), strict=True):
                assert d_k["v"] == pytest.approx(slope(got[-1], x, y)["v"], abs=1e-7)


def test_who_keeps_what() -> None:
    """d_k sum to 0 over equal steps and everyone; a dropped reply changes nothing, a loss begins anew."""
    own: list[list[Params]] = []
    lost, unused = [set[int](), set[int](), {0}], [set[int](), {1}, set[int]()]
    got = vrlsgd(model(), PERCEPTRONS, 3, lr, 1, 3, controls=own, unused=unused, lost=lost)
    assert np.allclose(sum(vector(d) for d in own[0]), 0, rtol=0, atol=1e-13)
    assert same(own[1][1], own[0][1])
    absent = vrlsgd(model(), PERCEPTRONS, 3, lr, 1, 3, cohorts=[[0, 1, 2], [0, 2], [0, 1, 2]])
    assert same(got[1], absent[1])
    assert not same(got[2], absent[2])
    inactive = vrlsgd(model(), PERCEPTRONS, 3, lr, 1, 3, steps_done=[{}, {1: 0}, {}])
    assert all(same(a, b) for a, b in zip(inactive, absent, strict=True))
