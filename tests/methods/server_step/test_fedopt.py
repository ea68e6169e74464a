"""The server optimisers beside Flower's own and torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import strategy as flower

import flwr_regs as fr
from flwr_regs.testing.problem import train
from tests.conftest import close, make_clients, make_model
from tests.flower.clients.test_plain_clients import Plain

EPOCH = {"local-epochs": 1}


def by_flower(strategy: Any) -> dict[str, np.ndarray]:
    """Four rounds of a plain NumPyClient, so that Flower's strategies can drive the same clients."""
    app = fr.client_app(lambda c: Plain(c.node_config["partition-id"], torch.float64))
    result = strategy.start(
        grid=fr.InProcessGrid(app, 4),
        initial_arrays=ArrayRecord(make_model().state_dict()),
        num_rounds=4,
        train_config=ConfigRecord({"lr": 0.2, **EPOCH}),
    )
    return {n: a.numpy() for n, a in result.arrays.items()}


def ours(strategy: Any, **more: Any) -> dict[str, np.ndarray]:
    """The same with our strategy and its client."""
    client = getattr(fr, f"{type(strategy).__name__}Client")
    return train(strategy, client, length=EPOCH, **more)[-1]


MOMENTS = {"beta_1": 0.8, "beta_2": 0.9, "tau": 0.01}
FLOWERS: dict[str, tuple[Any, Any]] = {
    "FedAvgM": (
        fr.FedAvgM(server_lr=0.7, momentum=0.6),
        partial(flower.FedAvgM, server_learning_rate=0.7, server_momentum=0.6),
    ),
    "FedAdagrad": (
        fr.FedAdagrad(server_lr=0.05, tau=0.01, initial_v=0.0),
        partial(flower.FedAdagrad, eta=0.05, tau=0.01),
    ),
    "FedYogi": (
        fr.FedYogi(server_lr=0.05, initial_v=0.0, **MOMENTS),
        partial(flower.FedYogi, eta=0.05, **MOMENTS),
    ),
    "FedAdam": (
        # Flower scales η by √(1 − β₂^{t+1}) / (1 − β₁^{t+1}); Reddi et al. do not correct
        fr.FedAdam(
            server_lr=0.05,
            server_lr_schedule=lambda t: (1 - 0.9 ** (t + 1)) ** 0.5 / (1 - 0.8 ** (t + 1)),
            initial_v=0.0,
            **MOMENTS,
        ),
        partial(flower.FedAdam, eta=0.05, **MOMENTS),
    ),
}


@pytest.mark.parametrize("name", FLOWERS)
def test_it_is_flowers_which_starts_at_zero(name: str) -> None:
    strategy, theirs = FLOWERS[name]
    close(ours(strategy), by_flower(theirs(fraction_evaluate=0.0)), 1e-12)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.RMSprop, lr=0.02),
        partial(torch.optim.SGD, lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(torch.optim.AdamW, lr=0.05, amsgrad=True),
    ],
    ids=lambda m: m.func.__name__,
)
def test_any_torch_optimiser_keeps_its_state_over_rounds(make: Any) -> None:
    """The same pseudo-gradients by hand, through one optimiser that lives as long as the run."""
    options: dict[str, Any] = {"seed": 1, "fraction_evaluate": 0.0}
    model = make_model()
    optimizer = make(model.parameters())
    base = optimizer.param_groups[0]["lr"]
    for t in range(1, 5):
        start = {n: p.detach().clone() for n, p in model.named_parameters()}

        def holding(state: dict[str, torch.Tensor] = start) -> torch.nn.Module:
            m = make_model()
            m.load_state_dict(state)
            return m

        end = ours(fr.FedAvg(**options), rounds=1, model=holding)
        for n, p in model.named_parameters():
            p.grad = start[n] - torch.from_numpy(end[n])
        optimizer.param_groups[0]["lr"] = base / t
        optimizer.step()
    got = ours(fr.FedOpt(make, server_lr_schedule=lambda t: 1 / t, **options))
    close(got, {n: p.detach().numpy() for n, p in model.named_parameters()}, 1e-12)


def test_what_is_no_optimiser_of_a_server_is_refused_before_round_1() -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, but it returned list"):
        fr.FedOpt(lambda params: params)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match=r"cannot run on the server.*closure"):
        ours(fr.FedOpt(torch.optim.LBFGS))


@pytest.mark.parametrize(
    "build", [lambda: fr.FedOpt(torch.optim.Adam), lambda: fr.FedAdam(server_lr=0.001)]
)
def test_half_precision_models_are_stepped_in_single(build: Any) -> None:
    half, single = (
        ours(build(), clients=make_clients(3, dtype), model=partial(make_model, dtype), rounds=3)
        for dtype in (torch.float16, torch.float32)
    )
    assert half["0.weight"].dtype == np.float16
    close({n: a.astype(np.float32) for n, a in half.items()}, single, 5e-3)
