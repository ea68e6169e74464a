"""Steps of a stack that run as a graph: the same bits, and what they depend on."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flwr_regs as fr
from flwr_regs.cohort import gradients_of_stack
from tests import conftest
from tests.conftest import Log
from tests.flower.stacks import data_of, perceptron

NEVER = 10**9


class Scaled(nn.Module):
    """A model that reads an attribute and a tensor which no `state_dict` has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale, self.shift = perceptron(), 1.0, torch.zeros(3)

    def forward(self, x: Any) -> Any:
        """Return the logits."""
        return self.layers(x) * self.scale + self.shift


class Embedded(nn.Module):
    """A model with an embedding, whose indices a step looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layers = nn.Embedding(3, 6), perceptron()

    def forward(self, x: Any) -> Any:
        """Return the logits."""
        return self.layers(x + self.rows((x[:, 0] > 0).long()))


def end(
    monkeypatch: pytest.MonkeyPatch,
    often: int,
    model: nn.Module,
    strategy: Any = fr.FedAvg,
    config: Any = None,
    on_round: Any = None,
    **settings: Any,
) -> tuple[dict[str, np.ndarray], list[bool]]:
    """Return the model after three rounds, and of each step that was traced whether it has a graph."""
    graphs: dict[Any, Any] = {}
    monkeypatch.setattr(gradients_of_stack, "OFTEN", often)
    monkeypatch.setattr(gradients_of_stack, "_GRAPHS", graphs)
    monkeypatch.setattr(gradients_of_stack, "_TAKEN", Counter())
    sets: Any = [data_of(k).dataset.tensors for k in range(5)]  # type: ignore[attr-defined]
    grid = fr.StackedGrid(fr.Clients(model, sets, batch_size=8, device="cpu", **settings))
    made = strategy(seed=3, fraction_evaluate=0.0, on_round=on_round)
    how = {"lr": 0.1, "train": {"local-steps": 3, **(config or {})}}
    arrays = conftest.run(made, fr.RegClient, rounds=3, model=lambda: model, grid=grid, **how)
    assert not grid.fallbacks
    return arrays, [graph is not None for graph in graphs.values()]


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "buffers and dropout": (lambda: perceptron(nn.BatchNorm1d(8), nn.Dropout(0.5)), {}),
    "momentum": (perceptron, {"config": {"momentum": 0.9}}),
    "clipped": (perceptron, {"config": {"clip-norm": 0.1}}),
    "Adam": (perceptron, {"optimizer": torch.optim.Adam}),
    "elementwise term": (perceptron, {"strategy": fr.SCAFFOLD}),
    "smooth loss": (perceptron, {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_as_a_graph_gives_the_bits_of_a_plain_step(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, given = CASES[case]
    plain, none = end(monkeypatch, NEVER, make(), **given)
    for often in (0, 1):
        found, traced = end(monkeypatch, often, make(), **given)
        assert traced
        assert all(traced)
        assert all(np.array_equal(found[n], a) for n, a in plain.items())
    assert not none


def test_a_change_of_the_model_between_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(often: int) -> dict[str, np.ndarray]:
        model = Scaled()

        def change(entry: Any) -> None:
            model.scale *= 0.5
            model.shift += 0.1

        found, traced = end(monkeypatch, often, model, on_round=change)
        assert len(traced) == (0 if often else 3)  # a graph a round
        return found

    plain, found = of(NEVER), of(0)
    assert all(np.array_equal(found[n], a) for n, a in plain.items())


def test_a_step_that_cannot_be_traced_runs_as_before(
    monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    plain, _ = end(monkeypatch, NEVER, drawn_model())
    found, traced = end(monkeypatch, 0, drawn_model())
    assert traced == [False]
    assert all(np.array_equal(found[n], a) for n, a in plain.items())
    assert not log("compiled")


def drawn_model() -> nn.Module:
    with conftest.drawn():
        return Embedded()
