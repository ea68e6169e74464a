"""The FedAMP oracle checked by itself: cloud models, FedProx, clients on their own."""

import math
from typing import Any

import numpy as np
import pytest

from tests.oracles.averaged import sgd
from tests.oracles.model import Params
from tests.oracles.numeric import SOME, apart, slopes
from tests.oracles.perceptron import CLIENTS, lr, model
from tests.oracles.personal.fedamp import clouds, fedamp


def run(**settings: Any) -> tuple[list[Params], list[dict[int, Params]], list[dict[int, Params]]]:
    personal: list[dict[int, Params]] = []
    sent: list[dict[int, Params]] = []
    full = {"lam": 0.5, "alpha": 0.7, "sigma": 5.0, "epochs": 2, "cohorts": SOME, **settings}
    models = fedamp(model(), CLIENTS, 4, lr, personal=personal, sent=sent, **full)
    return models, personal, sent


def test_cloud_models_by_hand() -> None:
    """0, 1 and 3 on a line, sigma 2: xi from the squares 1, 9 and 4."""
    own = {k: {"v": np.array([c])} for k, c in enumerate((0.0, 1.0, 3.0))}
    xi = [0.6 * math.exp(-square / 2) / 2 for square in (1, 9, 4)]
    found = clouds(own, 0.6, 2.0)
    assert found[0]["v"] == pytest.approx(xi[0] + 3 * xi[1], abs=1e-15)
    assert found[1]["v"] == pytest.approx(1 - xi[0] - xi[2] + 3 * xi[2], abs=1e-15)


def test_cloud_models_are_half_a_gradient_step_down_the_papers_attraction() -> None:
    """``A(x) = 1 - e^{-x/sigma}``; the gradient of ``A(|v_k - v_j|^2)`` is ``2 A' (v_k - v_j)``."""
    own = {k: model(k) for k in range(3)}

    def attraction(v: Params) -> float:
        squares = [sum(float(((v[n] - own[j][n]) ** 2).sum()) for n in v) for j in (1, 2)]
        return sum(1 - math.exp(-square / 30.0) for square in squares)

    down = slopes(attraction, own[0])
    wanted = {n: own[0][n] - 0.7 / 2 * down[n] for n in down}
    assert apart(clouds(own, 0.7, 30.0)[0], wanted) < 1e-8 < apart(wanted, own[0])


def test_a_pull_towards_the_cloud_model() -> None:
    """One step from u_k has none; the second is pulled by ``lam / alpha`` of the first."""
    short = [{}, {0: 2}, {}, {}]
    found = run(steps_done=short)
    u = found[2][0][0]
    first = sgd(u, CLIENTS[0][:1], lr(2))
    second = sgd(first, CLIENTS[0][1:2], lr(2))
    wanted = {n: second[n] - lr(2) * 0.5 / 0.7 * (first[n] - u[n]) for n in u}
    assert apart(found[1][1][0], wanted) < 1e-14 < apart(second, wanted)
