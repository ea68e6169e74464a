"""The SCAFFOLD oracle checked by itself: FedAvg, VRL-SGD, and what its control variates are."""

import numpy as np

from tests.oracles.client_step.scaffold import scaffold
from tests.oracles.model import Params, gradient
from tests.oracles.perceptron import CLIENTS, lr, model


def test_with_everyone_it_is_vrl_sgd() -> None:
    """Liang et al. 2019: ``v -= eta (grad - d_k)``, ``d_k += (w' - v_k) / (K eta)``, w' the next model."""
    w, d = model(), [{n: np.zeros_like(a) for n, a in model().items()} for _ in CLIENTS]
    got = scaffold(model(), CLIENTS, 4, lambda t: 0.2, 1, 3)
    for found in got:
        ends = []
        for k, batches in enumerate(CLIENTS):
            v = dict(w)
            for step in range(3):
                grad = gradient(v, *batches[step % len(batches)])
                v = {n: v[n] - 0.2 * (grad[n] - d[k][n]) for n in v}
            ends.append(v)
        w = {n: sum(v[n] for v in ends) / len(ends) for n in w}
        for k, v in enumerate(ends):
            d[k] = {n: d[k][n] + (w[n] - v[n]) / (3 * 0.2) for n in v}
        assert all(np.allclose(found[n], w[n], rtol=0, atol=1e-12) for n in w)


def test_the_servers_control_variate_is_the_mean_of_the_clients() -> None:
    controls: list[tuple[Params, list[Params]]] = []
    cohorts, unused = [[0, 2], [0, 1, 2], [1, 2], [0, 1]], [set(), {1}, set(), {0}]
    scaffold(model(), CLIENTS, 4, lr, 2, cohorts=cohorts, unused=unused, controls=controls)
    for c, own in controls:
        for n in c:
            assert np.allclose(c[n], sum(o[n] for o in own) / len(CLIENTS), rtol=0, atol=1e-14)
    assert abs(controls[-1][0]["2.bias"]).max() > 1e-3


def test_option_1_is_the_gradient_at_the_global_model() -> None:
    controls: list[tuple[Params, list[Params]]] = []
    got = scaffold(model(), CLIENTS, 2, lr, option=1, controls=controls)
    x, y = (np.concatenate(part) for part in zip(*CLIENTS[1], strict=True))
    want = gradient(got[0], x, y)
    assert all(np.allclose(controls[1][1][1][n], want[n], rtol=0, atol=1e-14) for n in want)
