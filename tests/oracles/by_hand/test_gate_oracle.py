"""The oracles of VRL-SGD and FedGATE checked by themselves: SCAFFOLD, by hand, and where they settle."""

import numpy as np
import pytest

from tests.oracles.client_step.gate import fedgate
from tests.oracles.model import Params
from tests.oracles.quadratics import CLIENTS, START, minimum, slope, whole


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
                START, whole(CLIENTS), 250, lambda t: 0.1, 1, steps, weighting, server_lr=0.8,
                controls=own, slope=slope,
            )  # fmt: skip
            assert got[-1]["v"] == pytest.approx([minimum(CLIENTS, p)], abs=1e-9)
            for d_k, [(x, y)] in zip(own[-1], whole(CLIENTS), strict=True):
                assert d_k["v"] == pytest.approx(slope(got[-1], x, y)["v"], abs=1e-7)
