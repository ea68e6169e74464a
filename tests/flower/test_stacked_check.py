"""The contract of a stack, and its check by result: what breaks it never ends in silence."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flwr_regs as fr
from flwr_regs.wire import keys
from tests.flower.test_stacked import (
    SIZES,
    Stacked,
    app_of,
    data_of,
    perceptron,
    run,
    values_of,
)

STRATEGY = {"seed": 3, "fraction_evaluate": 0.0}
CONFIG = {"lr": 0.1, "local-epochs": 2}
FACTOR = {"now": 1.0}


class Model(nn.Module):
    """A perceptron around a function of (this model, inputs)."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layer, self.function, self.calls = perceptron(*layers), function, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.function(self, x)


def counting(model: Any, x: Any) -> Any:
    model.calls += 1
    return model.layer(x) / model.calls


def switching(model: Any, x: Any) -> Any:
    """BatchNorm runs in eval mode in every other call."""
    model.calls += 1
    model.layer[1].train(model.calls % 2 > 0)
    return model.layer(x)


def by_factor(output: Any, targets: Any) -> Any:
    return FACTOR["now"] * nn.functional.cross_entropy(output, targets)


def drawn_rate(params: Any, lr: float) -> Any:
    return torch.optim.SGD(params, lr=lr * random.uniform(0.1, 2.0))


class Caching(Dataset[Any]):
    """The same tensors at every access, each time scaled."""

    def __init__(self, k: int) -> None:
        self.x, self.y = data_of(k).dataset.tensors  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        """Return an example."""
        return self.x[i].mul_(0.5), self.y[i]


class Buffered:
    """Batches that are written into the same memory."""

    def __init__(self, k: int) -> None:
        self.pairs, self.x = list(data_of(k, False, 4))[:5], torch.empty(4, 6)

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Any:
        for x, y in self.pairs:
            self.x[: len(x)] = x
            yield self.x[: len(y)], y


def set_factor(k: int, **_: Any) -> Any:
    FACTOR["now"] = 1.0 + k
    return data_of(k)


def kept(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what gives the same model to all clients."""
    one = make()
    return lambda: one


BROKEN: dict[str, Callable[[], dict[str, Any]]] = {
    "a forward that counts": lambda: {"model": kept(lambda: Model(counting))},
    "the same with dropout": lambda: {"model": kept(lambda: Model(counting, nn.Dropout(0.3)))},
    "BatchNorm in a mode of its own": lambda: {
        "model": lambda: Model(switching, nn.BatchNorm1d(8))
    },
    "a loss that reads a global": lambda: {"loss_fn": by_factor, "loader": set_factor},
    "an optimiser's factory that draws": lambda: {"optimizer": drawn_rate},
    "a data set that caches": lambda: {"loader": cache(lambda k, **_: DataLoader(Caching(k), 8))},
    "data in one buffer": lambda: {"loader": lambda k, **_: Buffered(k)},
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_breaks_the_contract_trains_one_by_one_with_a_warning(case: str, caplog: Any) -> None:
    """In the first round too."""
    grid = Stacked(app_of(fr.FedAvgClient, **BROKEN[case]())(), len(SIZES))
    caplog.set_level(logging.WARNING, logger="flwr")
    start(grid, rounds=2)
    assert all(" differs by " in why for why in grid.fallbacks)
    alone = [m for m in grid.alone if m.metadata.message_type == "train"]
    assert sum(grid.fallbacks.values()) == 2 * len(SIZES) == len(alone)
    said = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    assert all(why in one for why, one in zip(grid.fallbacks, said, strict=True))


def start(grid: Any, rounds: int = 1, strategy: Any = None) -> Any:
    """Train; return the strategy's result."""
    app_model = grid._app.client_fn(grid._contexts[1000]).model
    return (strategy or fr.FedAvg(**STRATEGY)).start(
        grid=grid,
        initial_arrays=ArrayRecord(app_model.state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord(CONFIG),
    )


@pytest.mark.parametrize("case", ["a loss that reads a global", "BatchNorm in a mode of its own"])
def test_the_kind_then_gives_what_its_clients_give_alone(case: str) -> None:
    """Each is made again by `client_fn`, so what that sets is its own."""
    made = BROKEN[case]()
    run(app_of(fr.FedAvgClient, **made), model=made.get("model", perceptron), config=CONFIG)


class Frozen(nn.Sequential):
    """Its BatchNorm never trains."""

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the other layers."""
        super().train(mode)
        self[1].eval()
        return self


def frozen() -> nn.Module:
    return Frozen(*perceptron(nn.BatchNorm1d(8)))


def noisy(model: Any, x: Any) -> Any:
    hidden = nn.functional.dropout(model.layer[0](x), 0.4)
    kept = torch.bernoulli(torch.full_like(hidden, 0.8))
    return model.layer[1](kept * hidden + 0.3 * torch.randn_like(hidden))


class Augmented(Dataset[Any]):
    """Adds torch's noise to each example."""

    def __init__(self, k: int) -> None:
        self.pairs = data_of(k).dataset

    def __len__(self) -> int:
        return len(self.pairs)  # type: ignore[arg-type]

    def __getitem__(self, i: int) -> Any:
        """Return an example."""
        x, y = self.pairs[i]
        return x + 0.1 * torch.randn(6), y


KEEPING: dict[str, dict[str, Any]] = {
    "frozen BatchNorm": {"model": frozen},
    "noise and dropout in the forward": {"model": lambda: Model(noisy)},
    "dropout and augmented data": {
        "model": lambda: perceptron(nn.Dropout(0.5)),
        "loader": lambda k, **_: DataLoader(Augmented(k), 8, shuffle=True),
    },
    "Adam, with a bias before BatchNorm": {
        "model": lambda: perceptron(nn.BatchNorm1d(8)),
        "optimizer": torch.optim.Adam,
    },
}


@pytest.mark.parametrize("case", KEEPING)
def test_what_keeps_the_contract_stacks(case: str) -> None:
    grid = Stacked(app_of(fr.FedAvgClient, **KEEPING[case])(), len(SIZES))
    start(grid)
    assert not grid.fallbacks


@pytest.mark.parametrize("dropout", [False, True])
def test_the_check_changes_nothing(dropout: bool) -> None:
    """The same bits as without it; clients keep their models, with a buffer that does not travel."""

    def trained(check: Any) -> Any:
        models = [perceptron(nn.BatchNorm1d(8), nn.Dropout(0.5 * dropout)) for _ in SIZES]
        for model in models:
            model.register_buffer("held", torch.ones(3), persistent=False)

        def client_fn(context: Any) -> Any:
            k = int(context.node_config["partition-id"])
            return fr.FedBNClient(models[k], data_of(k), device="cpu")

        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        grid = Stacked(fr.client_app(client_fn), len(SIZES), check=check)
        start(grid, 2, fr.FedBN(**STRATEGY))
        assert not grid.fallbacks
        states = [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()]  # noqa: NPY002
        return states, [values_of(m) for replies in grid.replies for m in replies.values()]

    (state, found), (expected_state, expected) = trained(1), trained(False)
    assert state == expected_state
    for a, b in zip(found, expected, strict=True):
        assert all(np.array_equal(a[key], b[key]) for key in b)


@pytest.mark.parametrize(("check", "refused"), [("first", 0), (False, 0), (2, 1), (1, 2)])
def test_when_the_check_runs(check: Any, refused: int) -> None:
    """The clients go wrong from the second of three rounds on."""
    grid = Stacked(app_of(fr.FedAvgClient, loss_fn=by_factor)(), len(SIZES), check=check)
    plain = grid._made

    def made(message: Any, context: Any) -> Any:
        later = message.content["config"]["server-round"] > 1
        FACTOR["now"] = 1.0 + context.node_config["partition-id"] * later
        return plain(message, context)

    grid._made = made  # type: ignore[method-assign]
    start(grid, 3)
    assert sum(grid.fallbacks.values()) == refused * len(SIZES)


@pytest.mark.parametrize("check", [0, -1, True, "always", 1.5])
def test_a_wrong_check_is_refused(check: Any) -> None:
    with pytest.raises(ValueError, match="check must be 'first', a number of rounds or False"):
        fr.StackedGrid(app_of(fr.FedAvgClient)(), 2, check=check)


def test_a_first_exchange_is_checked_too() -> None:
    def inside(model: Any, x: Any) -> Any:
        model.calls += 1
        return model.layer[1](model.layer[0](x) / model.calls)

    made = app_of(fr.RFedAvgPlusClient, kept(lambda: Model(inside)))
    grid = Stacked(made(), len(SIZES))
    start(grid, 2, fr.RFedAvgPlus(lam=0.3, **STRATEGY))
    assert sum(m.metadata.message_type == keys.PROBE for m in grid.alone) >= len(SIZES)
