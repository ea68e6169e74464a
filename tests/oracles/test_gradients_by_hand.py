"""The oracles' own gradients against central differences, and their parts in cases by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.oracles.client_loss import distillation, feddecorr, fedgkd, fedntd, moon
from tests.oracles.client_loss.logits import Loss, calibrated, counted, restricted
from tests.oracles.client_loss.rfedavg import distance_gradient
from tests.oracles.client_step.efl import compress, efl, fisher, half, only_largest
from tests.oracles.client_step.fedcurv import fedcurv
from tests.oracles.model import Client, Params, features, gradient, log_softmax, logits, loss
from tests.oracles.personal.apfl import apfl, mixed
from tests.oracles.personal.ditto import ditto
from tests.oracles.personal.fedamp import clouds, fedamp
from tests.oracles.personal.fedbabu import HEAD, descended, fedbabu
from tests.oracles.rounds import minus, square
from tests.oracles.server_step.fedavg import fedavg


def model(seed: int = 0) -> Params:
    """A perceptron of 3 inputs, 4 units and 3 classes."""
    rng = np.random.default_rng(seed)
    shapes = {"0.weight": (4, 3), "0.bias": 4, "2.weight": (3, 4), "2.bias": 3}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def client(seed: int, sizes: list[int]) -> Client:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(b, 3)), rng.integers(0, 3, size=b)) for b in sizes]


CLIENTS = [client(1, [4, 4, 1]), client(2, [5, 2]), client(3, [3])]
X, Y = CLIENTS[0][0]


def lr(t: int) -> float:
    return 0.3 / t


def slopes(value: Callable[[Params], float], w: Params) -> Params:
    """Return d value/d w by central differences of 1e-6."""
    out = {name: np.zeros_like(a) for name, a in w.items()}
    for name, a in w.items():
        for index in np.ndindex(a.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = {key: b.copy() for key, b in w.items()}
                moved[name][index] += step
                ends.append(value(moved))
            out[name][index] = (ends[0] - ends[1]) / 2e-6
    return out


def apart(a: Params, b: Params) -> float:
    """Return the largest difference of two models with the same names."""
    assert a.keys() == b.keys()
    return max(float(abs(a[name] - b[name]).max()) for name in a)


def stepped(value: Callable[[Params], float], w: Params, eta: float) -> Params:
    """A step down a function."""
    down = slopes(value, w)
    return {name: w[name] - eta * down[name] for name in w}


CLASSES, TARGET = np.array([5.0, 0.0, 3.0]), np.array([0.3, -0.2, 0.8, 0.1])
LOSSES: dict[str, Callable[[Params], tuple[float, Params]]] = {
    "cross-entropy": lambda w: (loss(w, X, Y), gradient(w, X, Y)),
    "MOON-0": lambda w: moon.contrast(w, model(1), model(2), X, 0.4, "0"),
    "MOON-1": lambda w: moon.contrast(w, model(1), model(2), X, 0.4, "1"),
    "MOON-2": lambda w: moon.contrast(w, model(1), model(2), X, 0.4, "2"),
    "FedNTD": lambda w: fedntd.distillation(w, model(1), X, Y, 3.0),
    "FedGKD": lambda w: fedgkd.distillation(w, model(1), X, 3.0),
    "FedADC+": lambda w: distillation.loss_and_gradient(w, model(1), X, Y, CLASSES, 0.4, 2.0),
    "FedDecorr": lambda w: feddecorr.decorrelation(w, X),
    "rFedAvg": lambda w: (
        float(((features(w, X).mean(axis=0) - TARGET) ** 2).sum()),
        distance_gradient(w, X, TARGET),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_is_that_of_its_loss(name: str) -> None:
    if name == "FedADC+":  # its target does not depend on the student, but on the labels
        assert distillation.target(np.full((1, 3), 1 / 3), np.array([2]), CLASSES) == pytest.approx(
            np.array([[0, 1 / 3, 2 / 3]])  # rho = 1, 0, 0.6
        )
    wanted = slopes(lambda w: LOSSES[name](w)[0], model())
    assert apart(LOSSES[name](model())[1], wanted) < 1e-8 < square(wanted)


@pytest.mark.parametrize(
    "of",
    [
        calibrated([3, 0, 7], 0.8, None),
        calibrated([3, 0, 7], 0.8, 1.0),
        restricted([3, 0, 7], 0.5),
    ],
)
def test_a_changed_cross_entropys_gradient_is_that_of_its_loss(of: Loss) -> None:
    z, y = np.random.default_rng(3).normal(size=(3, 3)), np.array([0, 2, 2])
    assert apart({"z": of(z, y)[1]}, slopes(lambda at: of(at["z"], y)[0], {"z": z})) < 1e-8


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
    assert counted([(X, np.array([0, 2])), (X, np.array([2]))], 3) == [1, 0, 2]


def test_distillations_and_contrast_by_hand() -> None:
    """Logits (0, 0, 0) beside (log 2, log 3, 0), label 0; z = (1, 0), z_g = (1, 1), z_p = (0, 1)."""

    def constant(*bias: float) -> Params:
        return {**{name: a * 0 for name, a in model().items()}, "2.bias": np.array(bias)}

    student, teacher = constant(0, 0, 0), constant(math.log(2), math.log(3), 0)
    value, _ = fedntd.distillation(student, teacher, X[:2], np.array([0, 0]), 1.0)
    # (3/4, 1/4) beside (1/2, 1/2), or (1/3, 1/2, 1/6) beside thirds
    assert value == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    value, _ = fedgkd.distillation(student, teacher, X[:2], 1.0)
    assert value == pytest.approx(0.5 * math.log(1.5) + math.log(0.5) / 6)

    # of two examples, every feature is 1/sqrt(2) or -1/sqrt(2): C_ij^2 = 1
    assert feddecorr.decorrelation(model(), X[:2])[0] == pytest.approx(1 / 2, 1e-3)
    assert feddecorr.decorrelation(model(), X[:1])[0] == 0.0

    z, z_g, z_p = (
        {"0.weight": np.array([[a], [b]]), "0.bias": np.zeros(2)}
        for a, b in ((1.0, 0.0), (1.0, 1.0), (0.0, 1.0))
    )
    value, _ = moon.contrast(z, z_g, z_p, np.array([[0.3], [2.0]]), 0.5, "0")
    e = math.exp(math.sqrt(0.5) / 0.5)  # cosines 1/sqrt(2) and 0
    assert value == pytest.approx(-math.log(e / (e + 1)), abs=1e-14)


# EFL and FedCurv


def test_fisher_is_the_mean_squared_per_sample_gradient() -> None:
    wanted = {name: np.zeros_like(a) for name, a in model().items()}
    for x, y in CLIENTS[1]:
        for b in range(len(y)):
            each = slopes(lambda w, x=x, y=y, b=b: log_softmax(logits(w, x))[b, y[b]], model())
            wanted = {name: wanted[name] + each[name] ** 2 / 7 for name in wanted}
    assert apart(fisher(model(), CLIENTS[1]), wanted) < 1e-8


@pytest.mark.parametrize(
    ("values", "q", "want"),
    [
        ([1.0, -4.0, 2.0, 0.5], 0.5, [0.0, -3.0, 3.0, 0.0]),  # by |T|, with its sign
        ([1.0, -1.0, 1.0, 1.0], 0.5, [1.0, -1.0, 0.0, 0.0]),  # exactly k, lower index first
        ([1.0, 2.0, -3.0, 2.0], 0.7, [0.0, 2.5, -2.5, 0.0]),  # floor(2.8) = 2
        ([1.0, 2.0, -3.0, 2.0], 0.01, [0.0, 0.0, -3.0, 0.0]),  # at least one
        ([0.0, 2.0, 0.0, 0.0], 0.5, [0.0, 1.0, 0.0, 0.0]),  # sign(0) = 0; mu still over k
    ],
)
def test_compress_by_hand(values: list[float], q: float, want: list[float]) -> None:
    """Two tensors: ST takes them as one vector."""
    got = compress({"a": np.array(values[:3]).reshape(3, 1), "b": np.array(values[3:])}, q)
    assert got["a"].shape == (3, 1)
    assert [*got["a"].ravel(), *got["b"]] == pytest.approx(want, abs=1e-15)


def test_what_travels_of_the_sums_by_hand() -> None:
    u, v = {"b": np.array([1.0]), "a": np.array([3.0, 1.0])}, {"b": np.ones(1), "a": np.ones(2)}
    kept_u, kept_v = only_largest(u, v, 0.7)  # floor(2.1); of equal ones the first by name
    assert [*kept_u["a"], *kept_u["b"]] == [3.0, 1.0, 0.0]
    assert [*kept_v["a"], *kept_v["b"]] == [1.0, 1.0, 0.0]
    assert half({"a": np.array([65504.0, 1.0002])})["a"].tolist() == [65504.0, 1.0]


@pytest.mark.parametrize("side", ["density_up", "density_down"])
def test_what_was_not_sent_follows(side: str) -> None:
    """From round 2 on nothing is learnt: the model moves by what the residual still holds."""
    w, once = model(), lambda t: 0.3 if t == 1 else 0.0
    rest = minus(fedavg(w, CLIENTS[:1], 1, once)[0], w)
    options: dict[str, Any] = {"lam": 0.0, side: 0.25}
    for after in efl(w, CLIENTS[:1], 3, once, **options):
        moved = compress(rest, 0.25)
        assert apart(minus(after, w), moved) < 1e-14
        rest, w = minus(rest, moved), after


@pytest.mark.parametrize(
    ("oracle", "strength", "others", "lost"),
    [
        (efl, 0.5, [0, 1, 2], set()),
        (fedcurv, 1.0, [0, 1], set()),
        (fedcurv, 1.0, [0, 1, 2], {2}),  # client 2 has lost its own, which counts as another's
    ],
)
def test_a_step_goes_down_the_penalised_loss(
    oracle: Any, strength: float, others: list[int], lost: set[int]
) -> None:
    """Client 2, of one batch, alone in round 2: strength λ Σ (v − v_i)' diag(F_i) (v − v_i)."""
    ends = [fedavg(model(), [batches], 1, lr)[0] for batches in CLIENTS]
    fishers = [fisher(v, batches) for v, batches in zip(ends, CLIENTS, strict=True)]

    def objective(v: Params) -> float:
        return loss(v, *CLIENTS[2][0]) + 0.7 * strength * sum(
            float((fishers[i][n] * (v[n] - ends[i][n]) ** 2).sum()) for i in others for n in v
        )

    plan = {"cohorts": [[0, 1, 2], [2]], "lost": [set(), lost]}
    first, second = oracle(model(), CLIENTS, 2, lr, lam=0.7, **plan)
    assert apart(second, stepped(objective, first, lr(2))) < 1e-6


def test_incomplete_weights_are_not_normalised_again() -> None:
    """EFL: client 0 takes 1 of its 3 steps, client 1 all of its 2; 9 and 7 examples."""
    w = model()
    (got,) = efl(w, CLIENTS[:2], 1, lr, lam=0.0, steps_done=[{0: 1}])
    (one,), (two,) = (
        fedavg(w, [c], 1, lr, 1, steps) for c, steps in zip(CLIENTS, (1, 2), strict=False)
    )
    want = {n: w[n] + 3 * 9 / 16 * (one[n] - w[n]) + 7 / 16 * (two[n] - w[n]) for n in w}
    assert apart(got, want) < 1e-12


# clients' own models


def test_steps_of_own_models_go_down_their_objectives() -> None:
    """One step each, from w; and a second round's, from what was kept."""
    w, ones = model(), client(3, [3])
    plan: dict[str, Any] = {"local_steps": 1, "personal": []}
    first, second = ditto(w, [ones], 2, lr, lam=0.7, personal_lr=0.2, **plan)
    u, u_next = (own[0] for own in plan["personal"])

    def pulled(v: Params) -> float:
        return loss(v, *ones[0]) + 0.7 / 2 * square(minus(v, first))

    assert apart(u_next, stepped(pulled, u, 0.2)) < 1e-8
    assert apart(second, fedavg(first, [ones], 1, lambda t: lr(2))[0]) == 0.0

    plan["personal"] = []
    first, _ = apfl(w, [ones], 2, lr, alpha=0.4, **plan)
    (u, a), (u_next, a_next) = (own[0] for own in plan["personal"])
    mixture = stepped(lambda u: loss(mixed(u, first, a), *ones[0]), u, lr(2))
    assert apart(u_next, mixture) < 1e-8
    slope = slopes(lambda a: loss(mixed(u, first, a["a"]), *ones[0]), {"a": np.array(a)})
    assert a_next == pytest.approx(a - lr(2) * slope["a"], abs=1e-9)
    assert a_next != a


def test_cloud_models() -> None:
    """By hand, 0, 1 and 3 on a line, σ = 2; and half a step down the paper's attraction."""
    line = {k: {"v": np.array([c])} for k, c in enumerate((0.0, 1.0, 3.0))}
    xi = [0.6 * math.exp(-s / 2) / 2 for s in (1, 9)]
    assert clouds(line, 0.6, 2.0)[0]["v"] == pytest.approx(xi[0] + 3 * xi[1], abs=1e-15)
    own = {k: model(k) for k in range(3)}

    def attraction(v: Params) -> float:
        return sum(1 - math.exp(-square(minus(v, own[j])) / 30.0) for j in (1, 2))

    assert apart(clouds(own, 0.7, 30.0)[0], stepped(attraction, own[0], 0.35)) < 1e-8

    sent: list[dict[int, Params]] = []
    settings: dict[str, Any] = {"lam": 0.5, "alpha": 0.7, "sigma": 5.0, "personal": (made := [])}
    fedamp(model(), CLIENTS, 2, lr, 1, 2, sent=sent, **settings)
    u = sent[0][2]  # the second step from u_k is pulled by lam / alpha of the first
    once = stepped(lambda v: loss(v, *CLIENTS[2][0]), u, lr(2))
    pulled = stepped(
        lambda v: loss(v, *CLIENTS[2][0]) + 0.5 / 0.7 / 2 * square(minus(v, u)), once, lr(2)
    )
    assert apart(made[1][2], pulled) < 1e-7


def test_fedbabus_parts() -> None:
    """The head stays; a step of a part is that of all, where it counts."""
    models = fedbabu(model(), CLIENTS, 2, lr)
    all_of_it = descended(model(), CLIENTS[2], 0.3, "all")
    assert apart(all_of_it, stepped(lambda w: loss(w, *CLIENTS[2][0]), model(), 0.3)) < 1e-8
    for part in ("head", "body"):
        trained = descended(model(), CLIENTS[2], 0.3, part)
        for name, start in model().items():
            moves = (name in HEAD) == (part == "head")
            assert np.array_equal(trained[name], all_of_it[name] if moves else start)
            still = np.allclose(models[-1][name], start, rtol=0, atol=1e-14)
            assert still == (name in HEAD)
