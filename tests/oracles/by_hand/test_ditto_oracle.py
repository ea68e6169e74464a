"""The Ditto oracle checked by itself: finite differences, FedAvg and FedProx, what is kept."""

from tests.oracles.model import Params, loss
from tests.oracles.numeric import apart, slopes
from tests.oracles.perceptron import CLIENTS, model
from tests.oracles.personal.ditto import pulled


def test_a_personal_step_goes_down_its_objective() -> None:
    u, w, (x, y) = model(), model(1), CLIENTS[0][0]

    def objective(u: Params) -> float:
        square = sum(float(((u[name] - w[name]) ** 2).sum()) for name in w)
        return loss(u, x, y) + 0.7 / 2 * square

    down = slopes(objective, u)
    wanted = {name: u[name] - 0.1 * down[name] for name in u}
    assert apart(pulled(u, w, [(x, y)], 0.1, 0.7), wanted) < 1e-8
