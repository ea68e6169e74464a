"""The server optimisers beside Flower's own and torch's."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import flwr_regs as fr
from flwr_regs.testing.problem import start_weights, train
from tests.conftest import QUIET, close, descend, make_clients, make_model


def ours(strategy: Any, **more: Any) -> dict[str, np.ndarray]:
    """The same with our strategy and its client."""
    client = getattr(fr, f"{type(strategy).__name__}Client")
    return train(strategy, client, length={"local-epochs": 1}, **more)[-1]


@pytest.mark.parametrize(
    ("name", "given", "own"),
    [
        ("RMSprop", {"lr": 0.02}, {}),
        ("SGD", {"lr": 0.5, "nesterov": True, "weight_decay": 0.01}, {"momentum": 0.9}),  # is ours
        ("AdamW", {"lr": 0.05, "amsgrad": True}, {}),
    ],
)
def test_any_torch_optimiser_keeps_its_state_over_rounds(name: str, given: Any, own: Any) -> None:
    """One client takes one step of its gradient's length: the server trains as torch does."""
    model, one = make_model(), make_clients(1)[0][:1]
    optimizer = getattr(torch.optim, name)(model.parameters(), **given, **own)
    for t in range(1, 5):
        optimizer.param_groups[0]["lr"] = given["lr"] / t
        descend(model, optimizer, one)
    alone = {**QUIET, "min_train_nodes": 1, "min_available_nodes": 1}
    strategy = fr.FedOpt(name, server_lr_schedule=lambda t: 1 / t, **given, **alone)
    got = ours(strategy, clients=[one], lr=1.0)
    close(got, {n: p.detach().numpy() for n, p in model.named_parameters()}, 1e-12)


def test_what_is_no_optimiser_of_a_server_is_refused_before_round_1() -> None:
    with pytest.raises(ValueError, match=r"torch\.optim\.Optimizer, but it returned list"):
        ours(fr.FedOpt(lambda params: params))  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match=r"cannot run on the server.*closure"):
        ours(fr.FedOpt(torch.optim.LBFGS))
    with pytest.raises(ValueError, match="of the parameters that it is given"):
        ours(fr.FedOpt(lambda params: torch.optim.SGD(make_model().parameters(), lr=1.0)))


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


def test_it_gets_fednovas_weighted_sum() -> None:
    """τ_eff and all: with lr = 0.5 the model moves by half of FedNova's step."""
    half_step = fr.TorchServerOptimizer(partial(torch.optim.SGD, lr=0.5))
    strategy = fr.RegStrategy([fr.NormalizedAveraging(), half_step], seed=3)
    half = train(strategy, partial(fr.RegClient, terms=[fr.NormalizedAveraging]), rounds=1)[0]
    whole = train(fr.FedNova(seed=3), fr.FedNovaClient, rounds=1)[0]
    start = start_weights()
    close(half, {n: (start[n] + whole[n]) / 2 for n in start}, 1e-12)


def test_a_schedule_multiplies_an_adaptive_servers_learning_rate() -> None:
    rounds: list[int] = []

    def half(number: int) -> float:
        rounds.append(number)
        return 0.5

    scheduled = ours(fr.FedYogi(server_lr=0.1, server_lr_schedule=half, seed=1))
    close(scheduled, ours(fr.FedYogi(server_lr=0.05, seed=1)), 1e-12)
    assert [*dict.fromkeys(rounds)] == [1, 2, 3, 4]
