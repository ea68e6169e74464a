"""Cohorts that train in a stack and one by one, to compare them: small models, unequal data, two grids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flwr_regs as fr
from flwr_regs.client.memory import decode
from flwr_regs.flower.grids.grid_network import GridNetwork
from flwr_regs.flower.grids.local_network import TRAINING
from flwr_regs.wire.parcel import Parcel
from tests.conftest import drawn, start

SIZES = (20, 23, 37, 20, 10)  # batches of 8: unequal steps, and last ones of 4, 7, 5, 4 and 2
TOLERANCE = 1e-5


class Recorded:
    """A network that notes the replies of each exchange with training clients."""

    def __init__(self, network: Any, replies: list[dict[int, Parcel]]) -> None:
        self._network, self._replies = network, replies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def ask(self, request: Any, timeout: float | None = None) -> Any:
        """Ask, and note the replies."""
        answers = self._network.ask(request, timeout)
        if request.kind in TRAINING:
            self._replies.append(dict(answers.came))
        return answers


class Watched:
    """A grid that notes what its clients reply to probes and train messages, one dict an exchange."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replies: list[dict[int, Parcel]] = []

    def network(self) -> Any:
        """Note the replies of its exchanges, also of messages."""
        return Recorded(super().network() or GridNetwork(self), self.replies)  # type: ignore[misc,arg-type]


class OneByOne(Watched, fr.InProcessGrid):
    """The grid that is right: its clients get messages, one after the other."""


class Stacked(Watched, fr.StackedGrid):
    """The grid under test."""


def perceptron(*layers: nn.Module) -> nn.Sequential:
    """Return a small model; the same weights each time."""
    with drawn():
        return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


class Model(nn.Module):
    """A perceptron around a function of (this model, inputs); or a loss, of (this, output, targets)."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layer, self.function, self.calls = perceptron(*layers), function, 0

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Return the logits, or the loss."""
        return self.function(self, *given)


def data_of(k: int, shuffle: bool = True, size: int = 8) -> DataLoader[Any]:
    """Return a client's loader over a plain data set."""
    g = torch.Generator().manual_seed(k)
    x = torch.randn(SIZES[k], 6, generator=g) + 0.2 * k
    y = torch.randint(0, 3, (SIZES[k],), generator=g)
    return DataLoader(TensorDataset(x, y), size, shuffle)


def pair(k: int) -> Any:
    """Return a client's inputs and labels."""
    return data_of(k).dataset.tensors  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Cohort:
    """Clients with unequal data, their method, and how they train.

    `method` is a strategy's name, with its hyper-parameters in `given`; or, if there are `terms`, their
    list. `settings` are the clients', in which a `step_budget` may depend on the client's number.
    """

    method: str = "FedAvg"
    given: Mapping[str, Any] = field(default_factory=dict)
    terms: Sequence[fr.Term] = ()
    model: Callable[[], nn.Module] = perceptron
    loader: Callable[..., Any] = data_of
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    client: Any = None
    mods: Sequence[Any] = ()
    rounds: int = 2
    grid: Mapping[str, Any] = field(default_factory=dict)

    def strategy(self, **more: Any) -> fr.RegStrategy:
        """Return the strategy; no client evaluates."""
        settings = {"seed": 3, "fraction_evaluate": 0.0, **self.given, **more}
        if self.terms:
            return fr.RegStrategy(self.terms, **settings)
        return getattr(fr, self.method)(**settings)  # type: ignore[no-any-return]

    def client_fn(self, context: Any) -> Any:
        """Return a client."""
        k = int(context.node_config["partition-id"])
        settings = {"device": "cpu", **self.settings}
        if self.terms:
            settings["terms"] = [type(t) for t in self.terms]
        if callable(settings.get("step_budget")):
            settings["step_budget"] = settings["step_budget"](k)
        kind = self.client or (fr.RegClient if self.terms else getattr(fr, self.method + "Client"))
        return kind(self.model(), self.loader(k), self.loader(k, shuffle=False), **settings)

    def app(self) -> Any:
        """Return the app of the clients."""
        return fr.client_app(self.client_fn, list(self.mods))

    def train(
        self, grid: Any, rounds: int | None = None, resume_from: Any = None, **more: Any
    ) -> Any:
        """Train on a grid; return the strategy, with `more` settings, and its result."""
        strategy, length = self.strategy(**more), {"local-epochs": 1}
        if "local-steps" in self.config:
            length = {}
        number, config = rounds or self.rounds, {"lr": 0.1, **length, **self.config}
        result = start(strategy, grid, number, self.model, config, resume_from=resume_from)
        return strategy, result

    def stacked(self, **more: Any) -> Stacked:
        """Return the grid on which the cohort has trained."""
        grid = Stacked(self.app(), len(SIZES), **{**self.grid, **more})
        self.train(grid)
        return grid


def compare(cohort: Cohort, app: Callable[[], Any] | None = None) -> Stacked:
    """Train on both grids, and compare every reply, all that clients keep, and the histories."""
    make, number = app or cohort.app, len(SIZES)
    grids = OneByOne(make(), number), Stacked(make(), number, **cohort.grid)
    histories = [cohort.train(grid)[0].history for grid in grids]
    expected, actual = grids
    assert len(actual.replies) == len(expected.replies)
    for number, (a, b) in enumerate(zip(actual.replies, expected.replies, strict=True), 1):
        assert list(a) == list(b)
        for pid in b:
            same(values_of(a[pid]), values_of(b[pid]), f"exchange {number}, client {pid}")
    same(kept_by(actual), kept_by(expected), "what the clients keep")
    for a, b in zip(*histories, strict=True):
        for key in ("cohort", "bytes_down", "bytes_up", "failures", "steps"):
            assert a.get(key) == b.get(key), key
    return actual


def values_of(reply: Parcel) -> dict[str, Any]:
    """Return all that a reply holds, by record and key; but for the training's id, which is random."""
    scalars = {"config": reply.config, "metrics": reply.metrics or {}}
    return {
        f"{name}/{key}": value
        for name, record in {**reply.records, **scalars}.items()
        for key, value in record.items()
        if key != "regs.start"
    }


def same(actual: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """Fail unless both hold the same entries, with numbers that are equal to 1e-5."""
    assert actual.keys() == expected.keys(), where
    for key, want in expected.items():
        got = actual[key]
        assert type(got) is type(want), (where, key)
        if key.endswith(("|code", "/regs.steps")):  # codes of numbers that are equal to 1e-5
            assert len(got) == len(want), (where, key)
        elif isinstance(want, np.ndarray):
            assert (got.dtype, got.shape) == (want.dtype, want.shape), (where, key)
            np.testing.assert_allclose(got, want, TOLERANCE, TOLERANCE, err_msg=f"{where} {key}")
        elif isinstance(want, float):
            assert got == pytest.approx(want, TOLERANCE, TOLERANCE), (where, key)
        else:
            assert got == want, (where, key)


def kept_by(grid: fr.InProcessGrid) -> dict[str, Any]:
    """Return what the clients keep; without the training's start id, which is random."""
    kept: dict[str, Any] = {}
    for node, state in grid.snapshot().items():
        for name, record in state.items():
            where = f"{node}/{name.split('.', 4)[-1]}"
            for key, value in record.items():
                if isinstance(record, ArrayRecord):
                    kept[f"{where}/{key}"] = value.numpy()
                elif isinstance(value, bytes):
                    slots = decode(value).items()
                    kept |= {
                        f"{where}/{key}/{t}.{n}": a.numpy() for t, s in slots for n, a in s.items()
                    }
    return kept
