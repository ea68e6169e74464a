"""FedNTD, FedLC, FedRS and FedGKD checked by themselves: finite differences, FedAvg, cases by hand."""

import math
from typing import Any

import numpy as np
import pytest

from tests.oracles.averaged import sgd
from tests.oracles.client_loss import fedgkd, fedntd
from tests.oracles.client_loss.logits import Loss, calibrated, counted, restricted
from tests.oracles.model import Params, loss
from tests.oracles.numeric import apart, slopes
from tests.oracles.perceptron import CLIENTS, lr, model

X, Y = CLIENTS[0][0]


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("about", ["not-true", "all"])
def test_a_distillations_gradient_is_that_of_its_loss(temperature: float, about: str) -> None:
    def of(w: Params) -> tuple[float, Params]:
        if about == "all":
            return fedgkd.distillation(w, model(1), X, temperature)
        return fedntd.distillation(w, model(1), X, Y, temperature)

    found, wanted = of(model())[1], slopes(lambda w: of(w)[0], model())
    assert apart(found, wanted) < 1e-8
    assert max(abs(a).max() for a in wanted.values()) > 1e-2


def test_distillations_by_hand() -> None:
    """Logits (0, 0, 0) beside (log 2, log 3, 0), label 0, at temperature 1."""

    def constant(*bias: float) -> Params:
        return {**{name: a * 0 for name, a in model().items()}, "2.bias": np.array(bias)}

    student, teacher = constant(0, 0, 0), constant(math.log(2), math.log(3), 0)
    x, y = X[:2], np.array([0, 0])
    value, g = fedntd.distillation(student, teacher, x, y, 1.0)  # (3/4, 1/4) beside (1/2, 1/2)
    assert value == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    np.testing.assert_allclose(g["2.bias"], [0, -0.25, 0.25], atol=1e-14)
    value, g = fedgkd.distillation(student, teacher, x, 1.0)  # (1/3, 1/2, 1/6) beside thirds
    assert value == pytest.approx(0.5 * math.log(1.5) + math.log(0.5) / 6)
    np.testing.assert_allclose(g["2.bias"], [0, -1 / 6, 1 / 6], atol=1e-14)


@pytest.mark.parametrize(
    "of",
    [
        calibrated([3, 0, 7], 0.8, None),
        calibrated([3, 0, 7], 0.8, 1.0),
        calibrated([30, 1, 7], 2.0, None),
        restricted([3, 0, 7], 0.5),
    ],
)
def test_a_changed_cross_entropys_gradient_is_that_of_its_loss(of: Loss) -> None:
    z, y = np.random.default_rng(3).normal(size=(3, 3)), np.array([0, 2, 2])
    _, found = of(z, y)
    wanted = slopes(lambda at: of(at["z"], y)[0], {"z": z})["z"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-8)


def test_changed_cross_entropies_by_hand() -> None:
    """Equal logits of 2; counts 1, 16 and 0, label 1."""
    z, y = np.full((1, 3), 2.0), np.array([1])
    value, g = calibrated([1, 16, 0], 1.0, None)(z, y)  # margins 1 and 1/2: the softmax of (0, 1/2)
    assert value == pytest.approx(math.log(1 + math.exp(-0.5)))
    assert g[0, 2] == 0.0
    value, _ = calibrated([1, 16, 0], 1.0, 1.0)(z, y)
    assert value == pytest.approx(math.log(1 + 2 * math.exp(-0.5)))
    value, _ = restricted([1, 16, 0], 0.5)(z, y)  # logits (2, 2, 1)
    assert value == pytest.approx(math.log(2 + math.exp(-1.0)))
    assert counted(CLIENTS[0], 3) == [
        sum(int((y == c).sum()) for _, y in CLIENTS[0]) for c in range(3)
    ]


@pytest.mark.parametrize("name", ["FedNTD", "FedGKD"])
def test_the_second_step_of_a_round_by_finite_differences(name: str) -> None:
    """The first is cross-entropy's: student and teacher are the same."""
    w, batches = model(), CLIENTS[0][:2]
    first = sgd(w, batches[:1], 0.3)
    x, y = batches[1]

    def objective(v: Params) -> float:
        if name == "FedNTD":
            return loss(v, x, y) + 0.8 * fedntd.distillation(v, w, x, y, 2.0)[0]
        return loss(v, x, y) + 0.8 / 2 * fedgkd.distillation(v, w, x, 2.0)[0]

    down = slopes(objective, first)
    wanted = {n: first[n] - 0.3 * down[n] for n in first}
    how: dict[str, Any] = {"local_steps": 2}
    if name == "FedNTD":
        found = fedntd.fedntd(w, CLIENTS[:1], 1, lr, **how, beta=0.8, tau=2.0)
    else:
        found = fedgkd.fedgkd(w, CLIENTS[:1], 1, lr, **how, gamma=0.8, temperature=2.0)
    assert apart(found[0], wanted) < 1e-8
