"""The loops of outside.py alone: values worked out by hand, and what each must be in a simple case."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles import outside as o
from tests.oracles.model import Client, Params


def model(seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    shapes = {"0.weight": (6, 4), "0.bias": (6,), "2.weight": (3, 6), "2.bias": (3,)}
    return {n: rng.normal(size=s) for n, s in shapes.items()}


def clients() -> list[Client]:
    rng = np.random.default_rng(1)
    return [
        [(rng.normal(size=(b, 4)), rng.integers(0, 3, b)) for b in sizes]
        for sizes in ([3, 2], [4], [5, 5, 1])
    ]


def apart(a: Params, b: Params) -> float:
    return max(float(np.abs(a[n] - b[n]).max()) for n in a)


def test_weights_worked_out_by_hand() -> None:
    got = o.nova_weights({1: 0.25, 2: 0.75}, {1: 2.0, 2: 4.0})  # effective steps: 3.5
    assert got == pytest.approx({1: 0.4375, 2: 0.65625})
    # L = 2: below = (1·4·1 + 2·3) + (1·4·2 + 2·5) = 28
    assert o.fair_weights({1: 3.0, 2: 5.0}, {1: 1.0, 2: 2.0}, 1.0, 0.5) == pytest.approx(
        {1: 6 / 28, 2: 10 / 28}
    )


def test_control_variates_sum_to_the_servers_whoever_falls_out() -> None:
    rounds = [
        [o.Turn(0, 3, "used"), o.Turn(1, 5, "lost")],
        [o.Turn(1, 2, "used"), o.Turn(2, 3, "unused")],
        [o.Turn(0, 1, "used"), o.Turn(2, 6, "used")],
    ]
    told = o.scaffold(model(), clients(), rounds, 0.2, "num-examples")
    for c, own in zip(told.c, told.own, strict=True):
        mean = {n: sum(c_k[n] for c_k in own.values()) / 3 for n in c}
        assert apart(mean, c) < 1e-14
    assert max(np.abs(a).max() for a in told.c[-1].values()) > 0.01


def test_a_control_variate_is_the_mean_gradient_of_the_steps() -> None:
    """From c = c_k = 0, one step: option 2 gives the gradient itself."""
    w, data = model(), clients()
    told = o.scaffold(w, data, [[o.Turn(1, 1, "used")]], 0.2, "uniform")
    assert apart(told.own[0][1], o.plain(w, data[1][0])) < 1e-13


def test_eight_bits_are_255_values_and_nothing_is_lost_in_the_long_run() -> None:
    x = np.random.default_rng(2).normal(size=4000)
    got = o.eight_bits(x)
    assert len(np.unique(got)) <= 255
    assert np.abs(got - x).max() <= np.abs(x).max() / 254 + 1e-15
    assert not o.eight_bits(np.zeros(3)).any()
    np.testing.assert_array_equal(o.eight_bits(got), got)
    w, data = model(), clients()
    for down in (False, True):
        one_client = [[o.Turn(0, 2, "used")]] * 30
        coded = o.quantised(w, data, one_client, 0.1, "uniform", down).models[-1]
        dense = o.nova(w, data, one_client, 0.1, "uniform").models[-1]
        assert 0 < apart(coded, dense) < 0.01
