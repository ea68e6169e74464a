"""StackedGrid against InProcessGrid, for models, data, losses and terms that are out of the ordinary.

Each case once gave other results in a stack, in silence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flwr_regs as fr
from flwr_regs.abilities import Addresses
from tests.flower.test_stacked import SIZES, Stacked, app_of, compare, data_of, perceptron, run


class Given(nn.Module):
    """A model of a function of (this model, inputs); always the same weights."""

    def __init__(self, forward: Callable[..., Any], k: int = 0) -> None:
        super().__init__()
        self.layer, self.forward_, self.calls = perceptron(), forward, 0
        self._factor = 1.0 + k
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Any) -> Any:
        """Return the logits."""
        return self.forward_(self, x)


def counts(model: Any, x: Any) -> Any:
    """Its output depends on how often it was called."""
    model.calls += 1
    return model.layer(x) / model.calls


def clamps(model: Any, x: Any) -> Any:
    """Its weights are cut to a range."""
    with torch.no_grad():
        model.layer[0].weight.clamp_(-0.1, 0.1)
    return model.layer(x)


def hooked(layer: Any) -> Any:
    """Return a layer with a hook on its weight."""
    layer.weight.register_hook(lambda grad: 0.1 * grad)
    return layer


class Words(nn.Module):
    """An embedding whose entry for padding is not trained."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(0)
            self.words, self.head = nn.Embedding(10, 4, padding_idx=4), nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.words((x * 3).long().clamp(-4, 5) + 4).flatten(1))


class Twice(nn.Module):
    """Layers that the model has under two names."""

    def __init__(self, twice: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(*perceptron(nn.BatchNorm1d(8), nn.Tanh()))
        if twice:
            self.first, self.norm = self.layers[0], self.layers[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.layers(x)


class Scalar(nn.Module):
    """A parameter without dimensions, and one without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = perceptron()
        self.scale, self.none = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.layer(x) * self.scale + self.none.sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "counts its calls": (lambda: Given(counts), "its model changes its own attributes"),
    "changes its weights": (lambda: Given(clamps), "changes its parameters in the forward pass"),
    "hook on a parameter": (
        lambda: nn.Sequential(hooked(perceptron()[0]), perceptron()[1]), "hooks on its model's parameters",
    ),
    "padding": (Words, ""),
    "a layer with two names": (Twice, ""),
}  # fmt: skip
"""Name -> (model, why it does not stack)."""


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_same(name: str) -> None:
    model, why = MODELS[name]
    grid = run(app_of(fr.FedAvgClient, model), model=model)
    assert all(why in reason for reason in grid.fallbacks)
    assert bool(grid.fallbacks) == bool(why)


def test_a_scalar_is_clipped_in_a_stack() -> None:
    grid = run(app_of(fr.FedAvgClient, Scalar), model=Scalar, config={"clip-norm": 0.1})
    assert not grid.fallbacks


def trained(kind: Any, client: Any, strategy: Any, twice: bool) -> dict[str, np.ndarray]:
    """Return the model of :class:`Twice` after a training."""

    def model() -> nn.Module:
        return Twice(twice)

    result = strategy.start(
        grid=kind(app_of(client, model)(), len(SIZES)),
        initial_arrays=ArrayRecord(model().state_dict()),
        num_rounds=2,
        train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
    )
    return {n: a.numpy() for n, a in result.arrays.items() if n.startswith("layers.")}


@pytest.mark.parametrize("kind", [fr.InProcessGrid, fr.StackedGrid])
def test_a_layer_with_two_names_is_trained_as_with_one(kind: Any) -> None:
    """Also by methods that call the model with other parameters."""
    for method, client, settings in ((fr.FedSAM, fr.FedSAMClient, {"rho": 0.1}),
                                     (fr.FedGKD, fr.FedGKDClient, {})):  # fmt: skip
        one, two = (
            trained(kind, client, method(seed=3, fraction_evaluate=0.0, **settings), twice)
            for twice in (False, True)
        )
        for n in one:
            np.testing.assert_allclose(two[n], one[n], 1e-5, 1e-5)


def test_clients_that_keep_their_models_keep_buffers_that_do_not_travel() -> None:
    def seen(model: Any, x: Any) -> Any:
        if model.training:
            model.seen.add_(1)
        return model.layer(x) * (1 + 0.1 * model.seen)

    def app() -> Any:
        kept: dict[int, Any] = {}

        def client_fn(context: Any) -> Any:
            k = int(context.node_config["partition-id"])
            if k not in kept:
                kept[k] = fr.FedAvgClient(Given(seen), data_of(k), device="cpu")
            return kept[k]

        return fr.client_app(client_fn)

    run(app, model=lambda: Given(seen))


def of_each(make: Callable[[int], dict[str, Any]]) -> Callable[[], Any]:
    """Return what makes an app whose clients differ in an argument."""

    def client_fn(context: Any) -> Any:
        k = int(context.node_config["partition-id"])
        given = {"model": perceptron(), "train_data": data_of(k), **make(k)}
        return fr.FedAvgClient(**given, device="cpu")

    return lambda: fr.client_app(client_fn)


def scaled(model: Any, x: Any) -> Any:
    """Its output depends on an attribute."""
    return model.layer(x) * model._factor


def test_each_client_has_its_own_class_weights_and_attributes() -> None:
    def weights(k: int) -> dict[str, Any]:
        return {"loss_fn": nn.CrossEntropyLoss(weight=torch.tensor([1.0, k + 1.0, 0.5]))}

    run(of_each(weights))
    run(of_each(lambda k: {"model": Given(scaled, k)}), model=lambda: Given(scaled))


def test_class_weights_that_are_equal_go_in_one_stack() -> None:
    made = of_each(lambda _: {"loss_fn": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))})
    assert not run(made).fallbacks


class Graph:
    """An input that is no tensor, and shows its size alone."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __repr__(self) -> str:
        return f"Graph({list(self.x.shape)})"


class Streamed:
    """Batches in a new order each time, without a length."""

    def __init__(self, k: int) -> None:
        self.x, self.y = data_of(k).dataset.tensors  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        for rows in torch.randperm(len(self.x)).split(8):
            yield self.x[rows], self.y[rows]


def graphs(k: int, shuffle: bool = True) -> Any:
    """Return batches of graphs."""
    return [(Graph(x), y) for x, y in data_of(k, False)]


def test_batches_of_other_things_than_tensors_are_each_clients_own() -> None:
    def model() -> nn.Module:
        return Given(lambda model, graph: model.layer(graph.x))

    grid = run(app_of(fr.FedAvgClient, model, loader=graphs), model=model)
    assert set(grid.fallbacks) == {"its batches hold a Graph"}


def test_data_without_a_length_shuffle_as_by_themselves() -> None:
    grid = run(app_of(fr.FedAvgClient, loader=lambda k, shuffle=True: Streamed(k)))
    assert set(grid.fallbacks) == {"its data have no length"}
    steps = {"local-steps": 4}
    made = app_of(fr.FedAvgClient, loader=lambda k, shuffle=True: Streamed(k))
    grid = compare(
        lambda: fr.FedAvg(seed=3, fraction_evaluate=0.0), made, len(SIZES), perceptron, {"lr": 0.1, **steps}
    )  # fmt: skip
    assert not grid.fallbacks


def test_an_optimiser_with_hooks_is_each_clients_own() -> None:
    def clipped(params: Any, lr: float) -> Any:
        mine = list(params)
        made = torch.optim.SGD(mine, lr=lr)

        def hook(*_: Any) -> None:
            nn.utils.clip_grad_norm_(mine, 0.05)

        made.register_step_pre_hook(hook)
        return made

    grid = run(app_of(fr.FedAvgClient, optimizer=clipped))
    assert set(grid.fallbacks) == {"its SGD has hooks or a step of its own"}


BAD = {1, 3}


def term(name: str, **hooks: Any) -> type[fr.Term]:
    """Return a term with these hooks."""
    body = {"name": name, "__annotations__": {"name": ClassVar[str]}, **hooks}
    return dataclass(frozen=True)(type(name, (fr.Term,), body))


COUNTS = {"needs": frozenset({"label_counts"})}
TERMS = {
    "id in a set": term(
        "set", finish=lambda _, d, c: ({n: -x if c.client_id in BAD else x for n, x in d.items()}, {}, {})
    ),
    "id in a dict": term("dict", loss=lambda _, base, p, c: base * {1: 2.0}.get(c.client_id, 1.0)),
    "id as text": term(
        "text", finish=lambda _, d, c: (d, {}, {f"of {c.client_id}": torch.ones(1)})
    ),
    "counts at the end": term(
        "end", **COUNTS, finish=lambda _, d, c: (d, {"n": c.label_counts.float()}, {})
    ),
    "counts over the data": term(
        "data", **COUNTS, finish=lambda _, d, c: (d, {"n": c.label_counts * c.mean_loss(c.start)}, {})
    ),
    "counts at the start": term(
        "first", **COUNTS,
        start=lambda _, p, c: {n: x * (1 + 0.01 * c.label_counts.float().mean()) for n, x in p.items()},
    ),
}  # fmt: skip
"""What terms may do with a client's id and its label counts."""


def five() -> nn.Module:
    """Return a model of more classes than there are labels."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))


def few(k: int, shuffle: bool = True) -> Any:
    """Return data whose last class differs between clients."""
    x, y = data_of(k).dataset.tensors  # type: ignore[attr-defined]
    return DataLoader(TensorDataset(x, y.clamp(max=k % 3)), 8, shuffle)


@pytest.mark.parametrize("name", TERMS)
def test_a_term_gives_the_same(name: str) -> None:
    kind = TERMS[name]
    run(
        app_of(fr.RegClient, five, loader=few, terms=[kind]),
        model=five,
        strategy=lambda: fr.RegStrategy([kind()], seed=3, fraction_evaluate=0.0),
    )


def test_a_broadcast_for_one_client_reaches_no_other() -> None:
    @dataclass(frozen=True)
    class Only(fr.Term, Addresses):
        name: ClassVar[str] = "only"

        def broadcast_to(self, pid: int, server: Any, ctx: Any) -> Mapping[str, Any]:
            return {n: np.full_like(a, 0.05) for n, a in ctx.params.items()} if pid == 1 else {}

        def correct(self, grads: Any, params: Any, ctx: Any) -> Any:
            return {n: g + ctx.broadcast.get(n, 0.0) for n, g in grads.items()}

    run(
        app_of(fr.RegClient, terms=[Only]),
        strategy=lambda: fr.RegStrategy([Only()], seed=3, fraction_evaluate=0.0),
    )


NOISE = {
    "like w_t": lambda g, c, n: torch.randn_like(c.start[n]),
    "one number": lambda g, c, n: torch.randn(()) * torch.ones_like(g),
    "random": lambda g, c, n: random.gauss(0, 1) * torch.ones_like(g),
    "numpy": lambda g, c, n: float(np.random.randn()) * torch.ones_like(g),  # noqa: NPY002
}


@pytest.mark.parametrize("drawn", NOISE)
def test_a_terms_noise_is_each_clients_own(drawn: str) -> None:
    """Else an average of many clients would have as much of it as one."""

    def correct(_: Any, grads: Any, params: Any, ctx: Any) -> Any:
        return {n: 1e3 * NOISE[drawn](g, ctx, n) for n, g in grads.items()}

    kind = term("noise", correct=correct, elementwise=True)
    grid = Stacked(app_of(fr.RegClient, terms=[kind])(), len(SIZES))
    fr.RegStrategy([kind()], seed=3, fraction_evaluate=0.0).start(
        grid=grid,
        initial_arrays=ArrayRecord(perceptron().state_dict()),
        num_rounds=1,
        train_config=ConfigRecord({"lr": 0.1, "local-steps": 1}),
    )
    found = [m.content["arrays"]["0.bias"].numpy() for m in grid.replies[0].values()]
    assert len({a.tobytes() for a in found}) == len(SIZES)


def gauss(_: Any, *given: Any) -> Any:
    """Draw from `random`, and then from numpy."""
    return torch.tensor([random.gauss(0, 1), np.random.randn()])  # noqa: NPY002


def over_the_data(_: Any, delta: Any, ctx: Any) -> Any:
    return delta, {"n": gauss(ctx.mean_loss(ctx.start))}, {}


def then_a_number(_: Any, delta: Any, ctx: Any) -> Any:
    drawn = gauss(ctx)
    return delta, {"n": drawn * float(ctx.mean_loss(ctx.start))}, {}  # no number under vmap


DRAWS = {
    "finish": {"finish": lambda _, d, c: (d, {"n": gauss(c)}, {})},
    "finish over the data": {"finish": over_the_data},
    "finish that fails under vmap": {"finish": then_a_number},
    "first exchange": {
        "probe": lambda _, c: ({"n": gauss(c)}, {}),
        "answer": lambda _, probes: probes,
    },
}
"""Where a term draws from generators that are not torch's, as each client by itself does."""


@pytest.mark.parametrize("where", DRAWS)
def test_a_terms_other_draws_are_each_clients_own(where: str) -> None:
    """The stack tries to draw for all members at once; it then starts from the same state."""
    kind = term("draws", **DRAWS[where])

    def strategy() -> Any:
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        return fr.RegStrategy([kind()], seed=3, fraction_evaluate=0.0)

    def loader(k: int, shuffle: bool = True) -> Any:
        x, y = data_of(k).dataset.tensors  # type: ignore[attr-defined]
        return DataLoader(TensorDataset(x[:9], y[:9]), 8, shuffle)

    app = app_of(fr.RegClient, loader=loader, terms=[kind])
    compare(strategy, app, len(SIZES), perceptron, {"lr": 0.1, "local-steps": 3})


def test_a_client_that_fails_keeps_no_state_of_the_failed_round() -> None:
    """One fails in `client_fn`, one as it trains; both have counted their calls by then."""
    calls: dict[int, list[int]] = {k: [] for k in range(2)}

    def client_fn(context: Any) -> Any:
        k = int(context.node_config["partition-id"])
        before = context.state.config_records.get("calls", {"n": 0})["n"]
        context.state["calls"] = ConfigRecord({"n": before + 1})
        if k < 2:
            calls[k].append(before)
        if k == 0:
            raise RuntimeError("no data here")
        x, y = data_of(k).dataset.tensors  # type: ignore[attr-defined]
        return fr.FedAvgClient(perceptron(), [(x, y + 7 * (k == 1))], device="cpu")

    fr.FedAvg(seed=3, fraction_evaluate=0.0).start(
        grid=fr.StackedGrid(fr.client_app(client_fn), len(SIZES)),
        initial_arrays=ArrayRecord(perceptron().state_dict()),
        num_rounds=2,
        train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
    )
    assert calls == {0: [0, 0], 1: [0, 0]}
