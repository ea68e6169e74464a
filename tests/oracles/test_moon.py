"""The MOON oracle checked by itself: finite differences, FedAvg, what is compared, a case by hand."""

import math

import numpy as np
import pytest

from tests.oracles.model import Params
from tests.oracles.moon import contrast, moon
from tests.oracles.numeric import SOME, apart, from_fedavg, slopes
from tests.oracles.test_efl import CLIENTS, lr, model


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


def test_without_the_term_it_is_fedavg_and_with_it_only_where_a_client_comes_back() -> None:
    assert max(from_fedavg(moon, mu=0.0)) < 1e-14
    first, second, *_ = from_fedavg(moon)
    assert first < 1e-14
    assert second > 1e-3


def test_what_a_client_keeps() -> None:
    """An unused reply's model is kept; what is lost is not there, as in a first round."""
    kept: list[dict[int, Params]] = []
    unused = [{0}, set[int](), set[int](), set[int]()]
    a = moon(model(), CLIENTS, 4, lr, 2, cohorts=SOME, unused=unused, kept=kept)
    assert [sorted(now) for now in kept] == [[0, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert kept[2][0] is kept[1][0]
    assert apart(kept[3][0], kept[1][0]) > 1e-3
    lost = [set[int](), {0}, set[int](), set[int]()]
    b = moon(model(), CLIENTS, 4, lr, 2, cohorts=SOME, unused=unused, lost=lost)
    assert apart(a[0], b[0]) == 0.0
    assert apart(a[1], b[1]) > 1e-4
    everyone = [{0, 1, 2}] * 4
    c = moon(model(), CLIENTS, 4, lr, 2, cohorts=SOME, lost=everyone, mu=5.0)
    assert apart(c[3], moon(model(), CLIENTS, 4, lr, 2, cohorts=SOME, mu=0.0)[3]) < 1e-14
