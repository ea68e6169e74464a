"""The Ditto oracle checked by itself: finite differences, FedAvg and FedProx, what is kept."""

from typing import Any

from tests.oracles import outside
from tests.oracles.averaged import sgd
from tests.oracles.ditto import ditto, pulled
from tests.oracles.fedprox import fedprox
from tests.oracles.model import Params, loss
from tests.oracles.numeric import SOME, apart, from_fedavg, slopes
from tests.oracles.test_efl import CLIENTS, lr, model


def run(**settings: Any) -> tuple[list[Params], list[dict[int, Params]]]:
    personal: list[dict[int, Params]] = []
    models = ditto(model(), CLIENTS, 4, lr, 2, cohorts=SOME, personal=personal, **settings)
    return models, personal


def test_a_personal_step_goes_down_its_objective() -> None:
    u, w, (x, y) = model(), model(1), CLIENTS[0][0]

    def objective(u: Params) -> float:
        square = sum(float(((u[name] - w[name]) ** 2).sum()) for name in w)
        return loss(u, x, y) + 0.7 / 2 * square

    down = slopes(objective, u)
    wanted = {name: u[name] - 0.1 * down[name] for name in u}
    assert apart(pulled(u, w, [(x, y)], 0.1, 0.7), wanted) < 1e-8


def test_the_global_model_is_fedavgs_or_fedproxs() -> None:
    assert max(from_fedavg(ditto, lam=3.0)) < 1e-14
    a, _ = run(mu=0.7)
    b = fedprox(model(), CLIENTS, 4, lr, 2, cohorts=SOME, mu=0.7)
    assert max(apart(x, y) for x, y in zip(a, b, strict=True)) < 1e-14


def test_without_the_pull_a_client_trains_alone() -> None:
    """From the global model of its first round: client 1's is the second."""
    models, personal = run(lam=0.0)
    alone = sgd(sgd(models[0], CLIENTS[1] * 2, lr(2)), CLIENTS[1] * 2, lr(3))
    assert sorted(personal[0]) == [0, 2]
    assert apart(personal[2][1], alone) < 1e-14
    slower = run(lam=0.0, personal_lr=0.05)[1]
    assert apart(slower[0][0], sgd(model(), CLIENTS[0] * 2, 0.05)) < 1e-14


def test_a_strong_pull_holds_it_at_the_global_model() -> None:
    """With ``eta lam = 1`` one step ends at w_t - eta grad F(u)."""
    models, personal = run(lam=20.0, personal_lr=0.05)
    assert apart(personal[3][0], models[2]) < apart(run(lam=0.1)[1][3][0], models[2])
    one = ditto(model(), CLIENTS[:1], 2, lr, local_steps=1, lam=20.0, personal_lr=0.05)
    u = pulled(pulled(model(), model(), CLIENTS[0][:1], 0.05, 20.0), one[0], [], 0.05, 20.0)
    moved = sgd(u, CLIENTS[0][:1], 0.05)
    wanted = {name: moved[name] - u[name] + one[0][name] for name in u}
    assert apart(pulled(u, one[0], CLIENTS[0][:1], 0.05, 20.0), wanted) < 1e-14


def test_what_is_kept() -> None:
    """An unused reply's personal model is kept; a lost one begins again at w_t."""
    unused = [{0}, set[int](), set[int](), set[int]()]
    models, personal = run(unused=unused)
    again = pulled(personal[0][0], models[0], CLIENTS[0] * 2, lr(2), 0.1)
    assert apart(personal[1][0], again) < 1e-14
    models, personal = run(lost=[set(), {0}, set(), set()])
    again = pulled(models[0], models[0], CLIENTS[0] * 2, lr(2), 0.1)
    assert apart(personal[1][0], again) < 1e-14
    short = run(steps_done=[{0: 2}, {}, {}, {}])[1]
    assert apart(short[0][0], pulled(model(), model(), CLIENTS[0][:2], lr(1), 0.1)) < 1e-14


def test_it_is_the_ditto_of_the_outside_methods() -> None:
    """Written for another test, by turns."""
    fates = {(1, 0): "unused"}
    turns = [
        [outside.Turn(k, 3, fates.get((t, k), "used")) for k in cohort]
        for t, cohort in enumerate(SOME)
    ]
    told = outside.ditto(model(), CLIENTS, turns, 0.2, "uniform", 0.6)
    personal: list[dict[int, Params]] = []
    models = ditto(
        model(), CLIENTS, 4, lambda _: 0.2, local_steps=3, weighting="uniform", cohorts=SOME,
        unused=[set(), {0}, set(), set()], lam=0.6, personal=personal,
    )  # fmt: skip
    for t in range(4):
        assert apart(models[t], told.models[t]) < 1e-14
        assert sorted(personal[t]) == sorted(told.own[t])
        assert max(apart(personal[t][k], told.own[t][k]) for k in personal[t]) < 1e-14
