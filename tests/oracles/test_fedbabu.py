"""The FedBABU oracle checked by itself: its body is trained, its head is not, and what fine-tuning does."""

import numpy as np
import pytest

from tests.oracles.averaged import sgd
from tests.oracles.fedavg import fedavg
from tests.oracles.fedbabu import fedbabu, fine_tuned, part_of
from tests.oracles.model import Params, gradient, loss
from tests.oracles.numeric import SOME, apart, slopes
from tests.oracles.test_efl import CLIENTS, lr, model

HEAD = ("2.weight", "2.bias")


def test_the_head_stays_and_a_step_of_the_body_is_fedavgs() -> None:
    found = fedbabu(model(), CLIENTS, 4, lr, 2, cohorts=SOME)
    for name in model():
        assert np.array_equal(found[-1][name], model()[name]) == (name in HEAD)
    one, plain = (m(model(), CLIENTS, 1, lr, local_steps=1)[0] for m in (fedbabu, fedavg))
    assert apart(one, {n: model()[n] if n in HEAD else plain[n] for n in plain}) < 1e-15


@pytest.mark.parametrize("part", ["all", "head", "body"])
def test_a_part_goes_down_the_loss(part: str) -> None:
    x, y = CLIENTS[0][0]
    found, wanted = part_of(part)(model(), x, y), slopes(lambda w: loss(w, x, y), model())
    for name in found:
        trained = part == "all" or (name in HEAD) == (part == "head")
        assert abs(found[name] - (wanted[name] if trained else 0.0)).max() < 1e-8


def test_personal_models_start_at_the_new_global_model() -> None:
    personal: list[dict[int, Params]] = []
    models = fedbabu(model(), CLIENTS, 2, lr, 2, personal_lr=0.1, personal=personal)
    assert apart(personal[1][2], sgd(models[1], CLIENTS[2] * 5, 0.1)) == 0.0
    found: list[dict[int, Params]] = []
    fedbabu(model(), CLIENTS, 2, lr, 2, personal_part="head", personal_epochs=1, personal=found)
    w = models[1]
    for x, y in CLIENTS[1]:
        w = w | {name: w[name] - lr(2) * gradient(w, x, y)[name] for name in HEAD}
    assert apart(found[1][1], w) < 1e-15
    assert apart(fine_tuned(models[1], CLIENTS[1], lr(2), "head", 1), w) < 1e-15
    with pytest.raises(ValueError, match="feet"):
        part_of("feet")
