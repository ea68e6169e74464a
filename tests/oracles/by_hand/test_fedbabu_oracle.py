"""The FedBABU oracle checked by itself: its body is trained, its head is not, and what fine-tuning does."""

import numpy as np
import pytest

from tests.oracles.model import loss
from tests.oracles.numeric import SOME, apart, slopes
from tests.oracles.perceptron import CLIENTS, lr, model
from tests.oracles.personal.fedbabu import fedbabu, part_of
from tests.oracles.server_step.fedavg import fedavg

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
