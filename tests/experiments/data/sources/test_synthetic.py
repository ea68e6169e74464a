"""Synthetic(alpha, beta) has the moments of its definition; the quadratics have their closed forms."""

import numpy as np
import pytest
import torch

import flwr_regs
from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.data.losses import half_square
from flwr_regs.experiments.models.layers import Quadratic


def test_each_client_has_a_linear_model_and_inputs_of_its_own() -> None:
    made = data.load("synthetic(1, 2, clients=200)")
    tests = np.bincount(made.test_groups)
    sizes = np.bincount(made.groups) + tests
    assert sizes.min() >= 50
    assert 3.6 < np.log(sizes - 49.5).mean() < 4.4  # a log-normal's
    assert 1.7 < np.log(sizes - 49.5).std() < 2.3
    assert (tests == sizes - (0.9 * sizes).astype(int)).all()
    means = np.stack([made.train_x[made.groups == g].mean(0) for g in range(200)])
    assert 1.7 < means.mean(1).std() < 2.3  # B_k from N(0, beta)
    assert 0.9 < (means - means.mean(1, keepdims=True)).std() < 1.1  # v_k from N(B_k, 1)
    largest = made.train_x[made.groups == sizes.argmax()]
    np.testing.assert_allclose(largest.std(0), np.arange(1.0, 61) ** -0.6, rtol=0.15)


@pytest.mark.parametrize(("spread", "curvature"), [(1.0, 2.0), (0.0, 0.0)])
def test_a_clients_mean_loss_is_its_quadratic(spread: float, curvature: float) -> None:
    made = data.load(f"quadratics(clients=3, dimension=4, spread={spread}, curvature={curvature})")
    model = Quadratic(4)
    torch.nn.init.normal_(model.x)
    point = model.x.detach().double().numpy()
    for g in range(3):
        rows = made.train_x[made.groups == g].astype(np.float64)
        matrix = rows[:, :-1].T @ rows[:, :-1] / 4  # A
        optimum = np.linalg.solve(rows[:, :-1], rows[:, -1])  # c
        values = np.linalg.eigvalsh(matrix)
        assert 1 - 1e-5 < values.min() <= values.max() < 1 + curvature + 1e-5
        assert spread or abs(optimum).max() < 1e-6
        output = model(torch.from_numpy(made.train_x[made.groups == g]))
        loss = half_square(output, torch.zeros(4, dtype=torch.int64))
        want = (point - optimum) @ matrix @ (point - optimum) / 2
        assert loss.item() == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_fedavg_with_one_step_reaches_the_global_optimum() -> None:
    """x* = (mean A_i)^+ (mean A_i c_i): the Field Guide, Sec. 4.3.1."""
    dataset = "quadratics(clients=4, dimension=3, curvature=1)"
    given = {"partition": "iid", "num_clients": 4, "seeds": [1], "batch_size": 12, "lr": 0.5}
    (run,) = flwr_regs.simulate("FedAvg", dataset=dataset, rounds=60, local_steps=1, **given).runs
    made = data.load(dataset)
    a, b = (np.asarray(of, np.float64) for of in (made.train_x[:, :-1], made.train_x[:, -1]))
    best = np.linalg.lstsq(a, b, rcond=None)[0]
    assert run.test[-1]["loss"] == pytest.approx(0.5 * ((a @ best - b) ** 2).mean(), rel=1e-3)
