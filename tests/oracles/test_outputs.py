"""FedNTD, FedLC, FedRS and FedGKD checked by themselves: finite differences, FedAvg, cases by hand."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.oracles import fedgkd, fedntd
from tests.oracles.averaged import sgd
from tests.oracles.fedgkd import mean
from tests.oracles.logits import Loss, calibrated, counted, fedlc, fedrs, restricted
from tests.oracles.model import Params, loss
from tests.oracles.numeric import SOME, apart, from_fedavg, slopes
from tests.oracles.test_efl import CLIENTS, lr, model

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


@pytest.mark.parametrize("lacks", [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
def test_neutral_losses_are_the_cross_entropy(lacks: list[float]) -> None:
    counts = [int(5 * a) for a in lacks]
    z, y = np.random.default_rng(3).normal(size=(3, 3)), np.array([0, 2, 2])
    w = {**model(), "2.weight": np.zeros((3, 4)), "2.bias": z[0]}
    plain = loss(w, X[:1], y[:1])
    for of in (calibrated(counts, 0.0, None), restricted(counts, 1.0)):
        assert of(z[:1], y[:1])[0] == pytest.approx(plain, abs=1e-14)


METHODS: list[tuple[Callable[..., list[Params]], dict[str, Any], dict[str, Any]]] = [
    (fedntd.fedntd, {"beta": 0.0}, {}),
    (fedlc, {"tau": 0.0}, {}),
    (fedrs, {"alpha": 1.0}, {}),
    (fedgkd.fedgkd, {"gamma": 0.0}, {}),
]


@pytest.mark.parametrize(("oracle", "neutral", "other"), METHODS)
def test_neutral_is_fedavg(
    oracle: Callable[..., list[Params]], neutral: dict[str, Any], other: dict[str, Any]
) -> None:
    assert max(from_fedavg(oracle, **neutral)) < 1e-14
    assert from_fedavg(oracle, **other)[0] > 1e-3


def test_the_teacher_is_the_mean_of_the_last_models() -> None:
    teachers: list[Params] = []
    models = fedgkd.fedgkd(model(), CLIENTS, 4, lr, 2, cohorts=SOME, buffer=2, teachers=teachers)
    all_models = [model(), *models]
    assert apart(teachers[0], model()) == 0.0
    for t in (1, 2, 3):
        a, b = all_models[t - 1], all_models[t]
        assert apart(teachers[t], {name: (a[name] + b[name]) / 2 for name in a}) < 1e-15
    one = mean(models[:1])
    assert apart(one, models[0]) == 0.0


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
