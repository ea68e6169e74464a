"""The contract of a stack, and its check by result: what breaks it never ends in silence."""

import logging
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn
from torch.utils.data import DataLoader

import flwr_regs as fr
from flwr_regs.cohort.stacks import LARGE
from tests.conftest import Items, Log, close
from tests.flower import stacks
from tests.flower.stacks import SIZES, Cohort, Model, Stacked, compare, data_of, pair, perceptron

CONFIG = {"local-epochs": 2}
FACTOR = {"loss": 1.0, "round": 1}


def counting(model: Any, x: Any) -> Any:
    model.calls += 1
    return model.layer[-1](model.layer[:-1](x) / model.calls)


def counting_tests(model: Any, x: Any) -> Any:
    return model.layer(x) if model.training else counting(model, x)


def switching(model: Any, x: Any) -> Any:
    """BatchNorm runs in eval mode in every other call."""
    model.calls += 1
    model.layer[1].train(model.calls % 2 > 0)
    return model.layer(x)


def projecting(model: Any, x: Any) -> Any:
    return model.layer(x * torch.rand(6, generator=torch.Generator().manual_seed(5)))


def by_factor(output: Any, targets: Any) -> Any:
    return FACTOR["loss"] * nn.functional.cross_entropy(output, targets)


def counting_loss(loss: Any, output: Any, targets: Any) -> Any:
    loss.calls += 1
    return nn.functional.cross_entropy(output, targets) / loss.calls


def drawn_rate(params: Any, lr: float) -> Any:
    return torch.optim.SGD(params, lr=lr * random.uniform(0.1, 2.0))


class Whole(fr.Term):
    """Sends a whole number, which a stack would send as a float."""

    name = "whole"

    def finish(self, delta: Any, ctx: Any) -> Any:
        """Return the steps as an upload."""
        return delta, {"n": torch.tensor(0) + 2**ctx.num_steps}, {}


class Normed(fr.Term):
    """Says that it is elementwise, and is not."""

    name, elementwise = "normed", True

    def correct(self, grads: Any, params: Any, ctx: Any) -> Any:
        """Return the gradients, each of length one."""
        return {n: g / g.norm() for n, g in grads.items()}


def items(k: int, make: Any) -> Items:
    return Items(*pair(k), make)


class Buffered:
    """Batches that are written into the same memory."""

    def __init__(self, k: int, shuffle: bool = True) -> None:
        self.pairs, self.x = list(data_of(k, False, 4))[:5], torch.empty(4, 6)

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Any:
        for x, y in self.pairs:
            self.x[: len(x)] = x
            yield self.x[: len(y)], y


class Setting:
    """Batches of client k; a pass over them sets the loss's factor, from a round on."""

    def __init__(self, k: int, since: int = 1) -> None:
        self.pairs, self.k, self.since = list(data_of(k, False)), k, since

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Any:
        FACTOR["loss"] = 1.0 + self.k * (FACTOR["round"] >= self.since)
        return iter(self.pairs)


def counted(*layers: nn.Module) -> Callable[[], nn.Module]:
    """Return what gives all clients the same model, which counts their calls."""
    one = Model(counting, *layers)
    return lambda: one


TWINS = {"loader": lambda k, **_: data_of(0)}
BROKEN: dict[str, Callable[[], dict[str, Any]]] = {
    "a forward that counts": lambda: {"model": counted(), **TWINS},
    "the same with dropout": lambda: {"model": counted(nn.Dropout(0.3))},
    "first exchange": lambda: {"model": counted(), "method": "RFedAvgPlus", "given": {"lam": 0.3}},
    "a mode of its own": lambda: {"model": lambda: Model(switching, nn.BatchNorm1d(8))},
    "a draw by a seed of its own": lambda: {"model": lambda: Model(projecting)},
    "a loss that reads a global": lambda: {
        "settings": {"loss_fn": by_factor},
        "loader": lambda k, **_: Setting(k),
    },
    "a loss that counts": lambda: {"settings": {"loss_fn": Model(counting_loss)}, **TWINS},
    "an optimiser's factory that draws": lambda: {"settings": {"optimizer": drawn_rate}},
    "a data set that scales its own tensors": lambda: {
        "loader": cache(lambda k, **_: DataLoader(items(k, lambda x, y: (x.mul_(0.5), y)), 8))
    },
    "data in one buffer": lambda: {"loader": Buffered},
    "an upload of whole numbers": lambda: {"terms": [Whole()]},
    "a correction that is not elementwise": lambda: {
        "terms": [Normed()],  # the first stack of two, of unequal steps, is as it should be
        "loader": lambda k, **_: [*data_of(k, False, 4)][: 1 + (k == 0)],
        "grid": {"memory": 5000},
    },
}
ALONE_TOO = (
    *("an upload of whole numbers", "a correction that is not elementwise"),
    *("a draw by a seed of its own", "a loss that reads a global", "a mode of its own"),
)
"""Those in which a client gives what it gives alone, whatever the others did before."""


@pytest.mark.parametrize("case", BROKEN)
def test_what_breaks_the_contract_trains_one_by_one_with_a_warning(case: str, log: Log) -> None:
    """In the first round too."""
    cohort = Cohort(config=CONFIG, **BROKEN[case]())
    grid = compare(cohort) if case in ALONE_TOO else cohort.stacked()
    assert all(" differs " in why for why in grid.fallbacks)
    stacked = 2 * (case == "a correction that is not elementwise")  # its first stack
    assert sum(grid.fallbacks.values()) >= 2 * len(SIZES) - stacked
    said = log("one by one", logging.WARNING)
    assert all(why in one for why, one in zip(grid.fallbacks, said, strict=True))


def test_a_stack_of_one_client_waits_until_its_kind_is_checked() -> None:
    """It would end in silence, where no two clients can be compared."""
    grid = compare(Cohort(config=CONFIG, loader=Buffered, grid={"memory": 1}))
    assert list(grid.fallbacks) == [LARGE]
    first_alone = Cohort(loader=lambda k, **_: data_of(k, size=8 if k else 4))
    assert not compare(first_alone).fallbacks


class Frozen(nn.Sequential):
    """Its BatchNorm never trains."""

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the other layers."""
        super().train(mode)
        self[1].eval()
        return self


def noisy(model: Any, x: Any) -> Any:
    hidden = nn.functional.dropout(model.layer[0](x), 0.4)
    kept = torch.bernoulli(torch.full_like(hidden, 0.8))
    return model.layer[1](kept * hidden + 0.3 * torch.randn_like(hidden))


def augmented(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Add torch's noise to an example, and draw in vain from the other generators."""
    _ = random.random(), np.random.rand()  # noqa: NPY002
    return x + 0.1 * torch.randn(6), y


class Noise(fr.Term):
    def correct(self, grads: Any, params: Any, ctx: Any) -> Any:
        return {n: g + 0.1 * torch.randn_like(g) for n, g in grads.items()}


PRIVATE = {"lam": 0.3, "noise_std": 1.0, "clip_norm": 1.0}
KEEPING: dict[str, dict[str, Any]] = {
    "frozen BatchNorm": {"model": lambda: Frozen(*perceptron(nn.BatchNorm1d(8)))},
    "noise and dropout in the forward": {"model": lambda: Model(noisy)},
    "noise like a gradient": {"terms": [Noise()]},
    "noise by a seed of the system's": {"method": "RFedAvgPlus", "given": PRIVATE},
    "Adam, with a bias before BatchNorm": {
        "model": lambda: perceptron(nn.BatchNorm1d(8)),
        "settings": {"optimizer": torch.optim.Adam},
    },
}


@pytest.mark.parametrize("case", KEEPING)
def test_what_keeps_the_contract_stacks(case: str) -> None:
    assert not Cohort(config=CONFIG, rounds=1, **KEEPING[case]).stacked().fallbacks


def test_the_check_changes_nothing() -> None:
    """The same bits as without it, from another seed of torch's.

    Clients keep their models, with a buffer that does not travel.
    """

    def trained(check: Any) -> Any:
        models = [perceptron(nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in SIZES]
        for model in models:
            model.register_buffer("held", torch.tensor([1, torch.nan]), persistent=False)

        def client_fn(context: Any) -> Any:
            k = int(context.node_config["partition-id"])
            loader = DataLoader(items(k, augmented), 8, True)
            return fr.FedBNClient(models[k], loader, device="cpu")

        torch.manual_seed(int(check))
        before = torch.get_rng_state()
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        grid = Stacked(fr.client_app(client_fn), len(SIZES), check=check)
        Cohort("FedBN", model=lambda: models[0]).train(grid)
        assert not grid.fallbacks
        assert torch.equal(torch.get_rng_state(), before)
        states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        return states, [stacks.values_of(m) for replies in grid.replies for m in replies.values()]

    (state, actual), (expected_state, expected) = trained(1), trained(False)
    assert state == expected_state
    for a, b in zip(actual, expected, strict=True):
        assert all(np.array_equal(a[key], b[key]) for key in b)


def remembering(model: Any, x: Any) -> Any:
    """The hidden layer adds what it was in the last call."""
    hidden = model.layer[0](x)
    last = getattr(model, "last", hidden)
    model.last = hidden
    return model.layer[1](hidden + last.detach() if last.shape == hidden.shape else hidden)


def tiring(model: Any, x: Any) -> Any:
    """The check does not train for so many calls."""
    model.calls += 1
    return model.layer(x) * (model.calls < 30)


def fading(model: Any, x: Any) -> Any:
    """A buffer that does not travel, and that each call makes smaller, in eval mode too."""
    model.scale.mul_(0.9)
    return model.layer(x) * model.scale


def run(kind: Any, function: Any, loss: Any = nn.CrossEntropyLoss, **settings: Any) -> Any:
    """Return (grid, strategy, end) of a training of clients that share a model around a function."""
    model = Model(function)
    model.register_buffer("scale", torch.ones(()), persistent=False)
    sets = [pair(k) for k in range(len(SIZES))]
    grid = kind(fr.Clients(model, sets, sets, batch_size=8, device="cpu", loss_fn=loss()))
    strategy, config = fr.FedAvg(seed=3, **settings), ConfigRecord({"lr": 0.1, "local-epochs": 1})
    result = strategy.start(grid, model.state_dict(), 3, train_config=config)
    return grid, strategy, {n: a.numpy() for n, a in result.arrays.items()}


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, partial(Model, counting_loss)])
@pytest.mark.parametrize("function", [remembering, fading, tiring])
def test_what_a_stack_stores_does_not_stay(function: Any, loss: Any) -> None:
    """In a model or a loss. The clients then train and evaluate one by one as if there had been none."""
    grid, _, actual = run(fr.StackedGrid, function, loss)
    assert sum(grid.fallbacks.values()) == 3 * len(SIZES)
    close(actual, run(fr.InProcessGrid, function, loss)[2], 1e-6)


@pytest.mark.parametrize("function", [counting, counting_tests])
def test_a_model_that_the_check_refuses_evaluates_one_by_one(function: Any) -> None:
    """On clients that have not trained, too."""

    def losses(kind: Any) -> Any:
        entry = run(kind, function, fraction_train=0.4)[1].history[0]
        return {pid: of["loss"] for pid, of in entry["evaluate"]["clients"].items()}

    actual, expected = losses(fr.StackedGrid), losses(fr.InProcessGrid)
    assert len(actual) == len(SIZES)
    assert actual == pytest.approx(expected)


CHECKS = [("first", 0, 3), (False, 0, 0), (9, 0, 3), (2, 1, 4), (1, 2, 5)]


@pytest.mark.parametrize(("check", "refused", "again"), CHECKS)
def test_when_the_check_runs(check: Any, refused: int, again: int) -> None:
    """The clients go wrong from the second of three rounds on, and then train once more."""
    FACTOR["round"] = 1
    cohort = Cohort(
        given={"on_round": lambda entry: FACTOR.update(round=entry["round"] + 1)},
        settings={"loss_fn": by_factor},
        loader=lambda k, **_: Setting(k, since=2),
        rounds=3,
    )
    grid = cohort.stacked(check=check)
    assert sum(grid.fallbacks.values()) == refused * len(SIZES)
    cohort.train(grid)
    assert sum(grid.fallbacks.values()) == again * len(SIZES)
