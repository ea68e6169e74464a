"""The server optimisers beside Flower's own and torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import strategy as flower

import flwr_regs
from flwr_regs import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgClient,
    FedAvgM,
    FedOpt,
    FedOptClient,
    FedYogi,
    InProcessGrid,
    client_app,
)
from tests.conftest import close, make_clients, make_model, run
from tests.flower.test_strategy import Plain

CONFIG = {"lr": 0.2, "local-epochs": 1}


def trained(strategy: Any) -> dict[str, np.ndarray]:
    """Four rounds of a plain NumPyClient, so that Flower's strategies can drive the same clients."""
    clients = make_clients(4)
    app = client_app(lambda c: Plain(make_model(), clients[c.node_config["partition-id"]]))
    result = strategy.start(
        grid=InProcessGrid(app, 4),
        initial_arrays=ArrayRecord(make_model().state_dict()),
        num_rounds=4,
        train_config=ConfigRecord(CONFIG),
    )
    return {n: a.numpy() for n, a in result.arrays.items()}


def ours(strategy: Any) -> dict[str, np.ndarray]:
    """The same with our strategy and its client."""
    return run(
        strategy,
        getattr(flwr_regs, f"{type(strategy).__name__}Client"),
        rounds=4,
        train={"local-epochs": 1},
    )


def test_fedavgm_equals_flowers() -> None:
    theirs = trained(
        flower.FedAvgM(server_learning_rate=0.7, server_momentum=0.6, fraction_evaluate=0.0)
    )
    close(ours(FedAvgM(server_lr=0.7, momentum=0.6)), theirs, 1e-12)


def test_fedadagrad_equals_flowers_which_starts_at_zero() -> None:
    theirs = trained(flower.FedAdagrad(eta=0.05, tau=0.01, fraction_evaluate=0.0))
    close(ours(FedAdagrad(server_lr=0.05, tau=0.01, initial_v=0.0)), theirs, 1e-12)


def test_fedyogi_equals_flowers_which_starts_at_zero() -> None:
    theirs = trained(
        flower.FedYogi(eta=0.05, beta_1=0.8, beta_2=0.9, tau=0.01, fraction_evaluate=0.0)
    )
    got = ours(FedYogi(server_lr=0.05, beta_1=0.8, beta_2=0.9, tau=0.01, initial_v=0.0))
    close(got, theirs, 1e-12)


def test_fedadam_differs_from_flowers_by_its_bias_correction_alone() -> None:
    """Flower scales η by √(1 − β₂^{t+1}) / (1 − β₁^{t+1}); Reddi et al. do not correct."""
    theirs = trained(
        flower.FedAdam(eta=0.05, beta_1=0.8, beta_2=0.9, tau=0.01, fraction_evaluate=0.0)
    )
    settings: dict[str, Any] = {"beta_1": 0.8, "beta_2": 0.9, "tau": 0.01, "initial_v": 0.0}
    plain = ours(FedAdam(server_lr=0.05, **settings))
    assert max(np.abs(plain[n] - theirs[n]).max() for n in plain) > 1e-3
    corrected = FedAdam(
        server_lr=0.05,
        server_lr_schedule=lambda t: (1 - 0.9 ** (t + 1)) ** 0.5 / (1 - 0.8 ** (t + 1)),
        **settings,
    )
    close(ours(corrected), theirs, 1e-12)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.Adam, lr=0.05),
        partial(torch.optim.RMSprop, lr=0.02),
        partial(torch.optim.Adagrad, lr=0.05),
        partial(torch.optim.SGD, lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(torch.optim.AdamW, lr=0.05, amsgrad=True),
    ],
    ids=lambda m: m.func.__name__,
)
def test_any_torch_optimiser_keeps_its_state_over_rounds(make: Any) -> None:
    """The same pseudo-gradients by hand, through one optimiser that lives as long as the run."""
    strategy = FedOpt(make, server_lr_schedule=lambda t: 1 / t, seed=1, fraction_evaluate=0.0)
    model = make_model()
    optimizer = make(model.parameters())
    base = optimizer.param_groups[0]["lr"]
    clients = make_clients(4)
    for t in range(1, 5):
        one_round = FedAvg(seed=1, fraction_evaluate=0.0)
        start = {n: p.detach().clone() for n, p in model.named_parameters()}

        def holding(state: dict[str, torch.Tensor] = start) -> torch.nn.Module:
            m = make_model()
            m.load_state_dict(state)
            return m

        end = run(
            one_round,
            FedAvgClient,
            rounds=1,
            clients=clients,
            model=holding,
            train={"local-epochs": 1},
        )
        for n, p in model.named_parameters():
            p.grad = start[n] - torch.from_numpy(end[n])
        optimizer.param_groups[0]["lr"] = base / t
        optimizer.step()
    got = run(strategy, FedOptClient, rounds=4, clients=clients, train={"local-epochs": 1})
    close(got, {n: p.detach().numpy() for n, p in model.named_parameters()}, 1e-12)


def test_something_that_is_no_optimiser_is_refused_when_built() -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, but it returned list"):
        FedOpt(lambda params: params)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FedAdam(tau=0.0), "FedAdam: tau must be a positive number, not 0.0"),
        (lambda: FedAdam(beta_1=1.0), "beta_1 must be a number from 0 to below 1, not 1.0"),
        (
            lambda: FedAdagrad(server_lr=-1.0),
            "FedAdagrad: server_lr must be a positive number, not -1.0",
        ),
    ],
)
def test_wrong_settings_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_an_optimiser_that_needs_a_closure_is_refused_before_round_1() -> None:
    with pytest.raises(ValueError, match=r"cannot run on the server.*closure"):
        ours(FedOpt(torch.optim.LBFGS))


@pytest.mark.parametrize(
    "build", [lambda: FedOpt(torch.optim.Adam), lambda: FedAdam(server_lr=0.001)]
)
def test_half_precision_models_are_stepped_in_single(build: Any) -> None:
    half, single = (
        run(
            build(),
            getattr(flwr_regs, f"{type(build()).__name__}Client"),
            clients=make_clients(3, dtype),
            model=partial(make_model, dtype),
            rounds=3,
            train={"local-epochs": 1},
        )
        for dtype in (torch.float16, torch.float32)
    )
    assert half["0.weight"].dtype == np.float16
    close({n: a.astype(np.float32) for n, a in half.items()}, single, 5e-3)


def test_a_wrong_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="rule must be"):
        flwr_regs.AdaptiveServer("Adam", 0.1, 0.9, 0.99, 0.001)
