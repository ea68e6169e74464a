"""The MOON oracle checked by itself: finite differences, FedAvg, what is compared, a case by hand."""

import math

import numpy as np
import pytest

from tests.oracles.client_loss.moon import contrast
from tests.oracles.model import Params
from tests.oracles.numeric import apart, slopes
from tests.oracles.perceptron import CLIENTS, model


@pytest.mark.parametrize("projection", ["0", "1", "2"])
def test_the_gradient_is_that_of_the_loss(projection: str) -> None:
    w, other, last, x = model(), model(1), model(2), CLIENTS[0][0][0]
    _, found = contrast(w, other, last, x, 0.4, projection)
    wanted = slopes(lambda v: contrast(v, other, last, x, 0.4, projection)[0], w)
    assert apart(found, wanted) < 1e-8 < max(abs(a).max() for a in wanted.values())


def test_the_loss_by_hand() -> None:
    """z = (1, 0), z_g = (1, 1), z_p = (0, 1): cosines 1/sqrt(2) and 0."""

    def of(a: float, b: float) -> Params:
        first = np.array([[a], [b]])
        rest = {"2.weight": np.zeros((3, 2)), "2.bias": np.zeros(3)}
        return {"0.weight": first, "0.bias": np.zeros(2), **rest}

    value, _ = contrast(of(1, 0), of(1, 1), of(0, 1), np.array([[0.3], [2.0]]), 0.5, "0")
    e = math.exp(math.sqrt(0.5) / 0.5)
    assert value == pytest.approx(-math.log(e / (e + 1)), abs=1e-14)
