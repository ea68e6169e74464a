"""The APFL oracle checked by itself: finite differences, its two ends a = 0 and a = 1, a step by hand."""

from typing import Any

import pytest

from tests.oracles.averaged import sgd
from tests.oracles.model import Params, loss
from tests.oracles.numeric import SOME, apart, slopes
from tests.oracles.perceptron import CLIENTS, lr, model
from tests.oracles.personal.apfl import apfl, mixed

Own = list[dict[int, tuple[Params, float]]]


def run(rounds: int = 4, **settings: Any) -> tuple[list[Params], Own]:
    own: Own = []
    where: dict[str, Any] = {"cohorts": SOME[:rounds], "epochs": 2, **settings}
    models = apfl(model(), CLIENTS, rounds, lr, personal=own, **where)
    return models, own


@pytest.mark.parametrize("chain", [True, False])
def test_a_step_goes_down_the_mixed_models_loss(chain: bool) -> None:
    """u by the gradient with respect to u, a by that with respect to a, both at the old values."""
    short = [{0: 3}, {0: 1}]
    models, own = run(2, alpha=0.4, chain=chain, cohorts=[[0, 2], [0]], steps_done=short)
    (u1, a1), (u2, a2) = (state[0] for state in own)
    v, (x, y), eta = models[0], CLIENTS[0][0], lr(2)
    down = slopes(lambda u: loss(mixed(u, v, a1), x, y), u1)
    factor = eta if chain else eta / a1
    assert apart(u2, {name: u1[name] - factor * down[name] for name in u1}) < 1e-8
    rise = (loss(mixed(u1, v, a1 + 1e-6), x, y) - loss(mixed(u1, v, a1 - 1e-6), x, y)) / 2e-6
    assert a2 == pytest.approx(a1 - eta * rise, abs=1e-9)
    assert abs(a2 - a1) > 1e-5


def test_at_one_the_own_model_trains_alone_and_at_zero_it_stays() -> None:
    models, own = run(alpha=1.0, learn=False)
    alone = sgd(sgd(models[0], CLIENTS[1] * 2, lr(2)), CLIENTS[1] * 2, lr(3))
    assert apart(own[2][1][0], alone) < 1e-14
    models, own = run(alpha=0.0, learn=False)
    assert apart(own[3][1][0], models[0]) == 0.0
    assert own[3][1][1] == 0.0
