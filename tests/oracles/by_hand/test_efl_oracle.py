"""The EFL oracle checked by itself: finite differences, FedAvg as a special case, worked cases."""

from typing import Any

import numpy as np
import pytest

from tests.oracles.client_step.efl import compress, efl, fisher
from tests.oracles.model import Params, log_softmax, logits, loss
from tests.oracles.perceptron import (
    CLIENTS,
    lr,
    lr_first_round_only,
    minus,
    model,
    nudged,
    same,
    vector,
)
from tests.oracles.server_step.fedavg import fedavg


def test_fisher_is_the_mean_squared_per_sample_gradient() -> None:
    w, batches, h = model(), CLIENTS[0], 1e-5
    got = fisher(w, batches)
    x = np.concatenate([x for x, _ in batches])
    y = np.concatenate([y for _, y in batches])

    def log_likelihoods(at: Params) -> np.ndarray:
        values: np.ndarray = log_softmax(logits(at, x))[np.arange(len(y)), y]
        return values

    for name in w:
        for index in np.ndindex(w[name].shape):
            up = log_likelihoods(nudged(w, name, index, h))
            down = log_likelihoods(nudged(w, name, index, -h))
            slopes = (up - down) / (2 * h)
            assert got[name][index] == pytest.approx((slopes**2).mean(), rel=1e-6, abs=1e-10)


@pytest.mark.parametrize(
    ("values", "q", "want"),
    [
        ([1.0, -4.0, 2.0, 0.5], 0.5, [0.0, -3.0, 3.0, 0.0]),  # by |T|, with its sign
        ([1.0, -1.0, 1.0, 1.0], 0.5, [1.0, -1.0, 0.0, 0.0]),  # exactly k, lower index first
        ([1.0, 2.0, -2.0, 2.0], 0.5, [0.0, 2.0, -2.0, 0.0]),
        ([1.0, 2.0, -3.0, 2.0], 0.7, [0.0, 2.5, -2.5, 0.0]),  # floor(2.8) = 2
        ([1.0, 2.0, -3.0, 2.0], 0.01, [0.0, 0.0, -3.0, 0.0]),  # at least one
        ([1.0, -2.0, 6.0, -3.0], 1.0, [3.0, -3.0, 3.0, -3.0]),
        ([0.0, 0.0, 0.0, 0.0], 0.5, [0.0, 0.0, 0.0, 0.0]),
        ([0.0, 2.0, 0.0, 0.0], 0.5, [0.0, 1.0, 0.0, 0.0]),  # sign(0) = 0; mu still over k
    ],
)
def test_compress_worked_cases(values: list[float], q: float, want: list[float]) -> None:
    # Two tensors: ST takes them as one vector.
    got = compress({"a": np.array(values[:3]).reshape(3, 1), "b": np.array(values[3:])}, q)
    assert got["a"].shape == (3, 1)
    assert vector(got) == pytest.approx(np.array(want), abs=1e-15)


def test_compress_count_is_not_lost_to_rounding() -> None:
    assert 100 * 0.29 < 29
    got = compress({"a": np.arange(1.0, 101.0)}, 0.29)
    assert np.count_nonzero(got["a"]) == 29


@pytest.mark.parametrize("side", ["density_up", "density_down"])
def test_the_residual_follows_in_the_next_rounds(side: str) -> None:
    w, q = model(), 0.25
    rest = minus(fedavg(w, CLIENTS[:1], 1, lr_first_round_only)[0], w)
    # From round 2 on nothing is learnt: the model moves by what the residual still holds.
    options: dict[str, Any] = {"lam": 0.0, side: q}
    got = efl(w, CLIENTS[:1], 3, lr_first_round_only, **options)
    for before, after in zip([w, *got], got, strict=False):
        moved = compress(rest, q)
        assert np.allclose(vector(minus(after, before)), vector(moved), rtol=1e-9, atol=1e-14)
        rest = minus(rest, moved)


def test_a_client_keeps_its_residual_while_away() -> None:
    w, q = model(), 0.25
    change = minus(fedavg(w, CLIENTS[:1], 1, lr_first_round_only)[0], w)
    kept = minus(change, compress(change, q))
    cases: list[dict[str, Any]] = [
        {"cohorts": [[0], [1], [0]]},
        {"cohorts": [[0], [0, 1], [0]], "steps_done": [{}, {0: 0}, {}]},
    ]
    for options in cases:
        got = efl(w, CLIENTS, 3, lr_first_round_only, lam=0.0, density_up=q, **options)
        assert same(got[1], got[0])  # client 1 learns nothing and holds nothing
        moved = vector(minus(got[2], got[1]))
        assert np.allclose(moved, vector(compress(kept, q)), rtol=1e-9, atol=1e-14)


def test_second_round_descends_equation_2() -> None:
    w, lam, h = model(), 0.7, 1e-5
    w_1 = fedavg(w, CLIENTS, 1, lr)[0]
    # Round 1's local models: one client alone in FedAvg gives its v_k.
    models = [fedavg(w, [batches], 1, lr)[0] for batches in CLIENTS]
    fishers = [fisher(v, batches) for v, batches in zip(models, CLIENTS, strict=True)]

    def objective(at: Params) -> float:
        value = loss(at, *CLIENTS[1][0])
        for v, u in zip(models, fishers, strict=True):
            value += lam / 2 * sum(float((u[n] * (at[n] - v[n]) ** 2).sum()) for n in at)
        return value

    cohorts = [[0, 1, 2], [1]]
    got = efl(w, CLIENTS, 2, lr, cohorts=cohorts, lam=lam, steps_done=[{}, {1: 1}])
    moved = minus(got[1], got[0])
    for name in w:
        for index in np.ndindex(w[name].shape):
            up, down = nudged(w_1, name, index, h), nudged(w_1, name, index, -h)
            slope = (objective(up) - objective(down)) / (2 * h)
            # One step of two done: the reply weighs E/s = 2.
            assert moved[name][index] == pytest.approx(-2 * lr(2) * slope, rel=1e-6, abs=1e-8)


def test_incomplete_weights_are_not_normalised_again() -> None:
    w = model()
    # Client 0 takes 1 of its 3 steps, client 1 all of its 2; 9 and 7 examples.
    got = efl(w, CLIENTS[:2], 1, lr, lam=0.0, steps_done=[{0: 1}])[0]
    first = minus(fedavg(w, CLIENTS[:1], 1, lr, local_steps=1)[0], w)
    second = minus(fedavg(w, CLIENTS[1:2], 1, lr)[0], w)
    want = vector(w) + 3 * 9 / 16 * vector(first) + 7 / 16 * vector(second)
    assert np.allclose(vector(got), want, rtol=1e-12, atol=1e-14)
