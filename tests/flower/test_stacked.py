"""StackedGrid against InProcessGrid: the same replies, states and histories, up to rounding."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flwr_regs as fr
from flwr_regs.abilities import Addresses
from flwr_regs.client.train.batches import Pairs
from flwr_regs.client.train.replay import Replay
from flwr_regs.cohort import finishing as stack_finish
from flwr_regs.cohort.batch_plan import draw
from flwr_regs.cohort.gradients_of_stack import Gradient
from flwr_regs.cohort.member_view import owner
from flwr_regs.flower.grids.stacked_grid import ALONE, STACKED
from flwr_regs.flower.grids.stacked_group import Kind
from flwr_regs.flower.grids.stacked_records import Kept, filled
from flwr_regs.testing import problem
from flwr_regs.wire.records import to_array
from tests.laws import CASES

SIZES = (20, 23, 37, 20, 10)  # batches of 8: unequal steps, and last ones of 4, 7, 5, 4 and 2
TOLERANCE = 1e-5


class Watched:
    """What a grid's clients reply to probes and train messages, and why they train one by one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replies: list[dict[int, Message]] = []
        self.alone: list[Message] = []

    def _serve(self, message: Message, app: Any) -> str:
        self.alone.append(message)
        return super()._serve(message, app)  # type: ignore[misc, no-any-return]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Note the replies, and pass them on."""
        pulled = list(super().pull_messages(message_ids))  # type: ignore[misc]
        if pulled and pulled[0].metadata.message_type in STACKED:
            self.replies.append({m.metadata.src_node_id: m for m in pulled})
        return pulled


class OneByOne(Watched, fr.InProcessGrid):
    """The grid that is right."""


class Stacked(Watched, fr.StackedGrid):
    """The grid under test."""


def values_of(message: Message) -> dict[str, Any]:
    """Return all that a reply holds, by record and key."""
    assert not message.has_error(), message.error.reason
    out: dict[str, Any] = {}
    for name, record in message.content.items():
        for key, value in record.items():
            out[f"{name}/{key}"] = value.numpy() if isinstance(record, ArrayRecord) else value
            assert isinstance(record, ArrayRecord | MetricRecord | ConfigRecord)
    return out


def same(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """Fail unless both hold the same entries, with numbers that are equal to 1e-5."""
    assert found.keys() == expected.keys(), where
    for key, want in expected.items():
        got = found[key]
        assert type(got) is type(want), (where, key)
        if key.endswith("|code"):  # as regs.update
            assert got.size == want.size, (where, key)
        elif isinstance(want, np.ndarray):
            assert (got.dtype, got.shape) == (want.dtype, want.shape), (where, key)
            np.testing.assert_allclose(got, want, TOLERANCE, TOLERANCE, err_msg=f"{where} {key}")
        elif isinstance(want, float):
            assert got == pytest.approx(want, TOLERANCE, TOLERANCE), (where, key)
        elif key.endswith("/regs.update"):  # the code of numbers that are equal to 1e-5
            assert len(got) == len(want), (where, key)
        else:
            assert got == want, (where, key)


def kept_by(grid: fr.InProcessGrid) -> dict[str, Any]:
    """Return what the clients keep; without the training's start id, which is random."""
    return {
        f"{node}/{name.split('.', 4)[-1]}/{key}": a.numpy()
        for node, state in grid.snapshot().items()
        for name, record in state.array_records.items()
        for key, a in record.items()
    }


def compare(
    strategy: Callable[[], Any],
    app: Callable[[], Any],
    clients: int,
    model: Callable[[], nn.Module],
    config: dict[str, Any],
    rounds: int = 3,
    **grid: Any,
) -> Stacked:
    """Train on both grids, and compare every reply, all kept state and the histories."""
    grids, histories = (OneByOne(app(), clients), Stacked(app(), clients, **grid)), []
    for one in grids:
        made = strategy()
        made.start(
            grid=one,
            initial_arrays=ArrayRecord(model().state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord(config),
        )
        histories.append(made.history)
    expected, found = grids
    assert len(found.replies) == len(expected.replies)
    for number, (a, b) in enumerate(zip(found.replies, expected.replies, strict=True), 1):
        assert list(a) == list(b)
        for node in b:
            same(values_of(a[node]), values_of(b[node]), f"round {number}, node {node}")
    same(kept_by(found), kept_by(expected), "what the clients keep")
    for a, b in zip(*histories, strict=True):
        for key in ("cohort", "bytes_down", "bytes_up", "failures", "steps"):
            assert a.get(key) == b.get(key), key
    return found


def started(strategy: Any, grid: Any, model: Callable[[], nn.Module], rounds: int = 1) -> Any:
    """Train; return the strategy's result."""
    return strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
    )


def perceptron(*layers: nn.Module) -> nn.Sequential:
    """Return a small model; the same weights each time."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


def data_of(k: int, shuffle: bool = True, size: int = 8) -> DataLoader[Any]:
    """Return a client's loader over a plain data set."""
    g = torch.Generator().manual_seed(k)
    x = torch.randn(SIZES[k], 6, generator=g) + 0.2 * k
    return DataLoader(
        TensorDataset(x, torch.randint(0, 3, (SIZES[k],), generator=g)), size, shuffle
    )


def app_of(
    client: Any, model: Callable[[], nn.Module] = perceptron, loader: Any = data_of, **settings: Any
) -> Callable[[], Any]:
    """Return what makes an app whose clients have unequal data."""

    def client_fn(context: Any) -> Any:
        k = int(context.node_config["partition-id"])
        mine = {n: v(k) if callable(v) and n == "step_budget" else v for n, v in settings.items()}
        return client(model(), loader(k), loader(k, shuffle=False), device="cpu", **mine)

    return lambda: fr.client_app(client_fn)


CLIENTS = {tuple(type(t) for t in m.terms if not t.server_only): m for m in reversed(CASES)}
"""A method for each chain of terms that clients run."""


@pytest.mark.parametrize("case", CLIENTS.values(), ids=lambda case: case.name)
def test_every_method_gives_the_same(case: Any) -> None:
    """In float64, on lists of batches, with unequal clients; a coded downlink goes one by one."""
    data = problem.make_clients()
    grid = compare(
        lambda: case.build(seed=3, fraction_evaluate=0.0),
        lambda: problem.app_of(case.make_client, data),
        len(data),
        problem.make_model,
        {"lr": 0.2, "local-epochs": 2},
        rounds=2,
    )
    coded = any(getattr(t, "density_down", None) for t in case.terms)
    assert set(grid.fallbacks) == ({"the downlink is coded"} if coded else set())


OPTIONS = {
    "steps": {"config": {"local-steps": 7}},
    "momentum": {"config": {"momentum": 0.9, "weight-decay": 0.01}},
    "clip": {"config": {"clip-norm": 0.3}},
    "Adam": {"config": {"optimizer": "Adam"}},
    "Adagrad": {"config": {"optimizer": "Adagrad"}},
    "own optimiser": {
        "optimizer": lambda p, lr: torch.optim.SGD(
            [{"params": [a for a in p if a.ndim > 1], "weight_decay": 0.1},
             {"params": [a for a in p if a.ndim < 2]}], lr=lr, momentum=0.5, nesterov=True,
        )
    },
    "budget": {"step_budget": lambda k: k + 1},
    "BatchNorm": {"model": lambda: normed()},
    "in order": {"loader": lambda k, shuffle=False: data_of(k, False)},
    "drop_last": {"loader": lambda k, **_: DataLoader(data_of(k).dataset, 8, True, drop_last=True)},
}  # fmt: skip
"""Options of a client or of the train config."""
PAIRS = [
    *("steps-FedProx", "momentum-FedFOR", "clip-FedDyn", "Adam-FedSAM", "Adagrad-FedAvg"),
    *("own optimiser-FedProx", "budget-FedADCPlus", "BatchNorm-FedBN", "in order-RFedAvgPlus"),
    *("drop_last-MimeLite", "budget-SCAFFOLD"),
]
SETTINGS = {
    "FedProx": {"mu": 0.3},
    "FedDyn": {"alpha": 0.2},
    "FedSAM": {"rho": 0.1},
    "RFedAvgPlus": {"lam": 0.3},
}


@pytest.mark.parametrize("pair", PAIRS)
def test_every_option_gives_the_same(pair: str) -> None:
    """On loaders that shuffle, over data sets of unequal length; some clients a round.

    In float32; in float64 where rounding grows: Adagrad divides by gradients, BatchNorm by deviations.
    """
    option, method = pair.split("-")
    given: dict[str, Any] = dict(OPTIONS[option])
    if option in ("BatchNorm", "Adagrad"):
        model, loader = given.get("model", perceptron), given.get("loader", data_of)
        given["model"] = lambda: model().double()
        given["loader"] = lambda k, **more: in_double(loader(k, **more))
    config = {"lr": 0.1, "local-epochs": 2, **given.pop("config", {})}
    if "local-steps" in config:
        del config["local-epochs"]
    settings = {
        "seed": 3,
        "fraction_train": 0.8,
        "fraction_evaluate": 0.0,
        **SETTINGS.get(method, {}),
    }
    grid = compare(
        lambda: getattr(fr, method)(**settings),
        app_of(getattr(fr, method + "Client"), **given),
        len(SIZES),
        given.get("model", perceptron),
        config,
        rounds=2,
    )
    assert set(grid.fallbacks) <= {ALONE}  # who has kept a slot, and who has not


def normed() -> nn.Sequential:
    """Return a model with BatchNorm, and no bias before it.

    The gradient of one would be rounding alone, and Adagrad would divide by it.
    """
    model = perceptron(nn.BatchNorm1d(8))
    model[0].bias = None
    return model


def in_double(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader with inputs in float64."""
    data: Any = loader.dataset
    data.tensors = (data.tensors[0].double(), *data.tensors[1:])
    return loader


def run(app: Any, clients: int = len(SIZES), **more: Any) -> Stacked:
    """Compare FedAvg on an app of perceptrons; return the stacked grid."""
    model = more.pop("model", perceptron)
    config = {"lr": 0.1, "local-epochs": 1, **more.pop("config", {})}
    strategy = more.pop("strategy", lambda: fr.FedAvg(seed=3, fraction_evaluate=0.0))
    return compare(strategy, app, clients, model, config, **{"rounds": 2, **more})


class OwnFit(fr.FedAvgClient):
    """A client with a `fit` of its own."""

    def fit(self, parameters: Any, config: Any) -> Any:
        """Train as every client does."""
        return super().fit(parameters, config)


def passing(message: Message, context: Any, call_next: Any) -> Message:
    """A mod that does nothing."""
    return call_next(message, context)


def counting(k: int, shuffle: bool = True) -> DataLoader[Any]:
    """A loader that shuffles by a generator of its own."""
    mine = torch.Generator().manual_seed(k)
    return DataLoader(data_of(k).dataset, 8, shuffle, generator=mine)


class Graph:
    """An input that is no tensor."""

    def __init__(self, x: Any) -> None:
        self.x = x


class OfGraphs(nn.Module):
    """A model of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = perceptron()

    def forward(self, graph: Any) -> torch.Tensor:
        """Return the logits."""
        return self.layer(graph.x)


class Streamed:
    """Batches in a new order each time, without a length."""

    def __init__(self, k: int) -> None:
        self.x, self.y = data_of(k).dataset.tensors  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        for rows in torch.randperm(len(self.x)).split(8):
            yield self.x[rows], self.y[rows]


def drawn_rate(params: Any, lr: float) -> Any:
    """An optimiser whose learning rate is drawn."""
    return torch.optim.SGD(params, lr=lr * (1 + float(torch.rand(()))))


class FullyConnected(nn.Module):
    """A model that branches on a value, which vmap refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.layer(x) if x.sum() > -1e9 else self.layer(-x)


REASONS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "own fit": (app_of(OwnFit), {}, "OwnFit has a fit of its own"),
    "mods": (
        lambda: fr.client_app(app_of(fr.FedAvgClient)().client_fn, [passing]), {}, "the app has mods",
    ),
    "other app": (
        lambda: _own_loop(), {}, "only an app of client_app(client_fn) shows its clients",
    ),
    "generator": (
        app_of(fr.FedAvgClient, loader=counting), {}, "its loader has a random generator of its own",
    ),
    "LBFGS": (
        app_of(fr.FedAvgClient), {"config": {"optimizer": "LBFGS"}},
        "LBFGS is not known to treat each number alone",
    ),
    "kept optimiser": (
        app_of(fr.FedAvgClient, keep_optimizer=True), {}, "FedAvgClient keeps its optimiser",
    ),
    "time budget": (
        app_of(fr.FedAvgClient, time_budget=1e9), {}, "FedAvgClient has a time_budget",
    ),
    "half precision": (
        app_of(fr.FedAvgClient),
        {"strategy": lambda: fr.FedAvg(seed=3, fraction_evaluate=0.0, wire_dtype="bfloat16")},
        "the model travels in half precision",
    ),
    "branches": (app_of(fr.FedAvgClient, FullyConnected), {"model": FullyConnected}, "vmap"),
    "graphs": (
        app_of(fr.FedAvgClient, OfGraphs, lambda k, **_: [(Graph(x), y) for x, y in data_of(k, False)]),
        {"model": OfGraphs}, "its batches hold a Graph",
    ),
    "no length": (
        app_of(fr.FedAvgClient, loader=lambda k, **_: Streamed(k)), {}, "its data have no length",
    ),
    "drawn rate": (
        app_of(fr.FedAvgClient, optimizer=drawn_rate), {},
        "its optimiser's factory draws random numbers",
    ),
}  # fmt: skip


def _own_loop() -> Any:
    in_order = app_of(fr.FedAvgClient, loader=lambda k, shuffle=False: data_of(k, shuffle=False))
    app, inner = fr.RegClientApp(), in_order()

    @app.train()
    def fit(message: Message, context: Any) -> Message:
        client = inner.client_fn(context)
        loop = fr.ClientRound(
            message, fr.FedAvgClient, client.model, client.train_data, device="cpu"
        )
        optimizer = loop.optimizer()
        for inputs, targets in loop.batches():
            optimizer.zero_grad()
            output = client.model(inputs)
            base = nn.functional.cross_entropy(output, targets)
            torch.autograd.backward(loop.loss(base, inputs, targets, output))
            loop.correct()
            optimizer.step()
        return loop.reply()

    return app


@pytest.mark.parametrize("why", REASONS)
def test_what_cannot_stack_trains_one_by_one_and_says_why(why: str, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    app, options, reason = REASONS[why]
    grid = run(app, rounds=1, **options)
    assert sum(grid.fallbacks.values()) == len(SIZES)
    (said,) = grid.fallbacks
    assert reason in said
    logged = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    assert len(logged) == 1
    assert reason in logged[0]


def test_clients_of_other_kinds_go_in_other_stacks() -> None:
    """One has another loss, and so trains by itself; one overrides `fit`."""

    def smooth(output: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(output, targets, label_smoothing=0.1)

    def client_fn(context: Any) -> Any:
        k = int(context.node_config["partition-id"])
        loss = smooth if k == 1 else nn.functional.cross_entropy
        kind = OwnFit if k == 2 else fr.FedAvgClient
        return kind(perceptron(), data_of(k), device="cpu", loss_fn=loss)

    grid = run(lambda: fr.client_app(client_fn))
    assert grid.fallbacks == {
        "no other client of the cohort is like it": 2,
        "OwnFit has a fit of its own": 2,
    }


def test_a_client_that_fails_fails_as_by_itself() -> None:
    """And keeps no state of the round. One's labels are not the model's, one fails in `client_fn`."""

    def client_fn(context: Any) -> Any:
        k = int(context.node_config["partition-id"])
        before = context.state.config_records.get("calls", {"n": 0})["n"]
        context.state["calls"] = ConfigRecord({"n": before + 1})
        x, y = data_of(k).dataset.tensors
        if k == 2:
            raise RuntimeError("no data here")
        return fr.FedAvgClient(perceptron(), [(x, y + 7 * (k == 1))], device="cpu")

    results = []
    for kind in (fr.InProcessGrid, fr.StackedGrid):
        strategy, grid = fr.FedAvg(seed=3, fraction_evaluate=0.0), None
        grid = kind(fr.client_app(client_fn), len(SIZES))
        started(strategy, grid, perceptron, 2)
        states = {n: s.config_records["calls"]["n"] for n, s in grid.snapshot().items()}
        results.append((strategy.history[0]["failures"], states))
    assert results[0] == results[1]
    assert sorted(results[0][0]) == [1, 2]
    assert results[0][1] == dict.fromkeys((1000, 1003, 1004), 2)


class Tied(nn.Module):
    """A frozen layer, a weight with two names, a buffer that does not travel, and one that counts."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(1)
            self.first, self.hold = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
            self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((6,), 0.9), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        if self.training:
            self.seen = self.seen + len(x)
        return self.head(torch.tanh(self.second(self.hold(self.first(x) * self.scale))))


class Convolving(nn.Module):
    """Two channels of 3 pixels, a convolution, GroupNorm and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(2)
            self.conv, self.head = nn.Conv1d(2, 4, 3, padding=1), nn.Linear(12, 3)
        self.group, self.batch = nn.GroupNorm(2, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = torch.relu(self.batch(self.group(self.conv(x.view(-1, 2, 3)))))
        return self.head(x.flatten(1))


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


class Named(nn.Module):
    """A model of two named inputs, which computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = perceptron()

    def forward(self, x: torch.Tensor, weight: torch.Tensor, labels: Any = None) -> Any:
        """Return the loss and the logits."""
        logits = self.layer(x * weight)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def in_dicts(k: int, shuffle: bool = True) -> list[dict[str, Any]]:
    """A client's batches as mappings."""
    x, y = data_of(k).dataset.tensors
    batches = zip(x.split(8), y.split(8), strict=True)
    return [{"x": a, "weight": torch.ones(len(a), 1) * 0.5, "labels": b} for a, b in batches]


MODELS = {
    "tied and frozen": (Tied, {}),
    "convolution": (Convolving, {}),
    "dicts": (Named, {"loader": in_dicts, "loss_fn": None}),
    "padding": (Words, {}),
    "a layer with two names": (Twice, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_gives_the_same(name: str) -> None:
    model, settings = MODELS[name]
    assert not run(app_of(fr.FedAvgClient, model, **settings), model=model).fallbacks


def test_a_scalar_is_clipped_in_a_stack() -> None:
    grid = run(app_of(fr.FedAvgClient, Scalar), model=Scalar, config={"clip-norm": 0.1})
    assert not grid.fallbacks


def test_no_client_reads_the_embedding_of_another() -> None:
    """A client with an index that there is not fails, as by itself."""

    class Indexed(Words):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(x).flatten(1))

    def loader(k: int, shuffle: bool = True) -> Any:
        x, y = data_of(k).dataset.tensors  # type: ignore[attr-defined]
        x = (x * 1.5).long().clamp(-4, 5) + 4
        x[0, 0] = 12 if k == 1 else 0
        return DataLoader(TensorDataset(x, y), 8)

    failed = []
    for kind in (fr.InProcessGrid, fr.StackedGrid):
        strategy = fr.FedAvg(seed=3, fraction_evaluate=0.0)
        started(strategy, kind(app_of(fr.FedAvgClient, Indexed, loader)(), len(SIZES)), Indexed)
        failed.append(strategy.history[0]["failures"])
    assert failed[0] == failed[1]
    assert sorted(failed[0]) == [1]


def test_private_entries_stay_with_their_clients() -> None:
    def strategy() -> Any:
        return fr.RegStrategy(
            [fr.Private("1.*")], seed=3, fraction_train=0.8, fraction_evaluate=0.0
        )

    made = app_of(fr.RegClient, terms=[fr.Private], private="1.*")
    grid = compare(strategy, made, len(SIZES), perceptron, {"lr": 0.1, "local-epochs": 1}, rounds=4)
    assert not grid.fallbacks


def test_a_large_cohort_trains_in_several_stacks() -> None:
    grid = run(app_of(fr.FedAvgClient), memory=2 * (6 * 4 * 83 + 400))  # two models of 83 numbers
    assert set(grid.fallbacks) == {"no other client of the cohort is like it"}


def test_a_checkpoint_of_one_grid_goes_on_on_the_other(tmp_path: Any) -> None:
    def trained(first: Any, second: Any, folder: Any) -> dict[str, np.ndarray]:
        made = app_of(fr.FedDynClient)
        given = {"initial_arrays": ArrayRecord(perceptron().state_dict()),
                 "train_config": ConfigRecord({"lr": 0.1, "local-epochs": 1})}  # fmt: skip
        settings = {"alpha": 0.2, "seed": 3, "fraction_evaluate": 0.0, "checkpoint_dir": folder}
        fr.FedDyn(**settings).start(grid=first(made(), len(SIZES)), num_rounds=2, **given)
        result = fr.FedDyn(**settings).start(
            grid=second(made(), len(SIZES)), num_rounds=4, resume_from=folder, **given
        )
        return {n: a.numpy() for n, a in result.arrays.items()}

    expected = trained(fr.InProcessGrid, fr.InProcessGrid, tmp_path / "a")
    for i, pair in enumerate(
        [(fr.StackedGrid, fr.InProcessGrid), (fr.InProcessGrid, fr.StackedGrid)]
    ):
        same(trained(*pair, tmp_path / str(i)), expected, str(pair))


@dataclass(frozen=True)
class Halved(fr.Term):
    """Sends half of the update, times a factor that needs all of the client's data."""

    name: ClassVar[str] = "halved"

    def finish(self, delta: Any, ctx: Any) -> Any:
        """Return the update, and note the loss."""
        loss = ctx.mean_loss(ctx.start)
        return {n: 0.5 * d * loss / loss for n, d in delta.items()}, {"loss": loss}, {}


def test_a_finish_that_needs_the_data_may_change_the_update() -> None:
    grid = run(
        app_of(fr.RegClient, terms=[Halved]),
        strategy=lambda: fr.RegStrategy([Halved()], seed=3, fraction_evaluate=0.0),
    )
    assert not grid.fallbacks


OVER_DATA = {
    "mean_features": (fr.RFedAvg, fr.RFedAvgClient, {"lam": 0.3}),
    "some features": (fr.RFedAvg, fr.RFedAvgClient, {"lam": 0.3, "delta_batches": 2}),
    "fisher": (fr.FedCurv, fr.FedCurvClient, {"lam": 0.5}),
    "some fisher": (fr.EFL, fr.EFLClient, {"lam": 0.5, "density_up": 0.3, "fisher_samples": 11}),
    "mean_loss": (fr.QFedAvg, fr.QFedAvgClient, {"q": 1.0}),
    "mean_gradient": (fr.MimeLite, fr.MimeLiteClient, {}),
    "at the start": (fr.SCAFFOLD, fr.SCAFFOLDClient, {"option": 1}),
}


@pytest.mark.parametrize("method", OVER_DATA)
def test_clients_with_data_of_one_size_finish_together(method: str, monkeypatch: Any) -> None:
    """Some have 20 examples, others 23; what a hook asks of all the data is computed for all at once."""
    monkeypatch.setattr(stack_finish, "_each", None)  # a stack that needs it fails
    strategy, client, settings = OVER_DATA[method]
    indexed = "some" in method

    def loader(k: int, shuffle: bool = True) -> Any:
        g, n = torch.Generator().manual_seed(k), (20, 23)[k % 2]
        data = TensorDataset(torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g))
        made = DataLoader(data, 8, shuffle and indexed)
        return made if indexed else list(made)

    def model() -> nn.Module:
        return perceptron(nn.BatchNorm1d(8))

    grid = compare(
        lambda: strategy(seed=3, fraction_evaluate=0.0, **settings),
        app_of(client, model, loader),
        6,
        model,
        {"lr": 0.1, "local-steps": 4},
        rounds=2,
        check=False,
    )
    assert not grid.fallbacks


PROBES = {
    "RFedAvgPlus": fr.LeaveOneOutMean(0.3),
    "some": fr.LeaveOneOutMean(0.3, delta_batches=2),
    "Mime": fr.CorrectedMomentum(0.9),
}


@pytest.mark.parametrize("method", PROBES)
def test_first_exchanges_stack(method: str) -> None:
    """Also of clients with data of other sizes, private entries, and a budget that has no say in it."""
    terms = [fr.LocalBatchNorm(), PROBES[method]]

    def model() -> nn.Module:
        return perceptron(nn.BatchNorm1d(8))

    made = app_of(fr.RegClient, model, terms=[type(t) for t in terms], step_budget=lambda k: k + 2)
    grid = compare(
        lambda: fr.RegStrategy(terms, seed=3, fraction_train=0.8, fraction_evaluate=0.0),
        made,
        len(SIZES),
        model,
        {"lr": 0.1, "local-epochs": 2},
    )
    assert not grid.fallbacks
    assert not any(c.metadata.message_type in STACKED for c in grid.alone)


@dataclass(frozen=True)
class Odd(fr.Term):
    """Reads, in an elementwise correction, what differs between clients."""

    name: ClassVar[str] = "odd"
    elementwise: ClassVar[bool] = True
    reads: str = ""

    def correct(self, grads: Any, params: Any, ctx: Any) -> Any:
        """Return the gradients, plus some of what is read."""
        if self.reads == "nothing":
            return {n: torch.ones_like(ctx.start[n]) for n in grads}
        value = getattr(ctx, self.reads)
        more = value.float().mean() if self.reads == "output" else value
        return {n: g + 0.01 * more for n, g in grads.items()}


def at_once(monkeypatch: Any) -> list[bool]:
    """Note, step by step, whether all members' gradients are corrected without vmap."""
    noted: list[bool] = []
    plain = Gradient._at_once

    def noting(self: Gradient, *args: Any) -> Any:
        noted.append(False)
        found = plain(self, *args)
        noted[-1] = True
        return found

    monkeypatch.setattr(Gradient, "_at_once", noting)
    return noted


ELEMENTWISE = {
    "FedCM": (fr.FedCM, fr.FedCMClient, {"alpha": 0.3}),
    "SCAFFOLD": (fr.SCAFFOLD, fr.SCAFFOLDClient, {}),
}


@pytest.mark.parametrize("steps", ["equal", "unequal"])
@pytest.mark.parametrize("method", ELEMENTWISE)
def test_elementwise_corrections_go_without_vmap(method: str, steps: str, monkeypatch: Any) -> None:
    strategy, client, settings = ELEMENTWISE[method]
    noted = at_once(monkeypatch)
    grid = compare(
        lambda: strategy(seed=3, fraction_evaluate=0.0, **settings),
        app_of(client),
        len(SIZES),
        perceptron,
        config={"lr": 0.1, **({"local-steps": 5} if steps == "equal" else {"local-epochs": 2})},
        rounds=2,
        check=False,
    )
    assert not grid.fallbacks
    divides = steps == "unequal" and method in ("FedADC", "FedCM")  # by the client's own number
    assert all(noted) != divides


@pytest.mark.parametrize("reads", ["output", "client_id", "num_steps", "nothing"])
def test_what_an_elementwise_term_may_read(reads: str, monkeypatch: Any) -> None:
    noted = at_once(monkeypatch)
    grid = run(
        app_of(fr.RegClient, terms=[Odd]),
        strategy=lambda: fr.RegStrategy([Odd(reads)], seed=3, fraction_evaluate=0.0),
        check=False,
    )
    assert not grid.fallbacks
    assert set(noted) == {reads == "nothing"}


def test_ignored_targets_count_as_by_themselves() -> None:
    def loader(k: int, shuffle: bool = True) -> DataLoader[Any]:
        inputs, targets = data_of(k).dataset.tensors  # type: ignore[attr-defined]
        targets = torch.where(torch.arange(len(targets)) % 20 == 0, -100, targets)
        return DataLoader(TensorDataset(inputs, targets), 8, shuffle)

    assert not run(app_of(fr.FedAvgClient, loader=loader)).fallbacks


@pytest.mark.parametrize("faster", ["in stacks", "one by one"])
def test_the_faster_way_is_taken(faster: str, monkeypatch: Any, caplog: Any) -> None:
    """After two rounds; all rounds give the same replies."""
    caplog.set_level(logging.INFO, logger="flwr")
    timed, seconds = Kind.timed, (1, 2) if faster == "in stacks" else (2, 1)
    monkeypatch.setattr(Kind, "timed", lambda self, *_: timed(self, *seconds))
    grid = run(app_of(fr.FedAvgClient, Convolving), model=Convolving, rounds=4, measure=True)
    slower = {"a stack of such clients is slower": 2 * len(SIZES)}
    assert grid.fallbacks == ({} if faster == "in stacks" else slower)
    assert f"from now on {faster}" in caplog.text


def test_autocast_is_near(caplog: Any) -> None:
    """In bfloat16 a step has some 3 digits; the weights stay in float32."""

    def once(**how: Any) -> dict[str, np.ndarray]:
        grid = fr.StackedGrid(app_of(fr.FedAvgClient)(), len(SIZES), **how)
        result = fr.FedAvg(seed=3, fraction_evaluate=0.0).start(
            grid=grid,
            initial_arrays=ArrayRecord(perceptron().state_dict()),
            num_rounds=1,
            train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
        )
        assert not grid.fallbacks
        return {n: a.numpy() for n, a in result.arrays.items()}

    expected, found = once(), once(precision="bfloat16")
    off = max(abs(found[n] - expected[n]).max() for n in expected)
    assert 0 < off < 0.01


def test_two_runs_give_equal_bits_with_dropout() -> None:
    def model() -> nn.Module:
        return perceptron(nn.Dropout(0.5))

    def once(noise: int) -> list[dict[str, Any]]:
        torch.manual_seed(noise)
        grid = Stacked(app_of(fr.FedAvgClient, model)(), len(SIZES))
        fr.FedAvg(seed=3, fraction_evaluate=0.0).start(
            grid=grid,
            initial_arrays=ArrayRecord(model().state_dict()),
            num_rounds=2,
            train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
        )
        assert not grid.fallbacks
        return [values_of(m) for replies in grid.replies for m in replies.values()]

    for a, b in zip(once(1), once(2), strict=True):
        for key, value in a.items():
            assert np.array_equal(value, b[key]), key


def test_each_client_has_a_dropout_mask_of_its_own() -> None:
    """Clients with the same data end apart; the mean update is that of one by one."""

    def model() -> nn.Module:
        return perceptron(nn.Dropout(0.5))

    def updates(kind: Any) -> np.ndarray:
        grid = kind(
            app_of(fr.FedAvgClient, model, loader=lambda _, shuffle=False: data_of(0))(), 200
        )
        fr.FedAvg(seed=3, fraction_evaluate=0.0).start(
            grid=grid,
            initial_arrays=ArrayRecord(model().state_dict()),
            num_rounds=1,
            train_config=ConfigRecord({"lr": 0.1, "local-steps": 1}),
        )
        return np.stack([values_of(m)["arrays/2.weight"] for m in grid.replies[0].values()])

    found, expected = updates(Stacked), updates(OneByOne)
    assert len(np.unique(found.reshape(200, -1), axis=0)) == 200
    spread = expected.std(0) / 200**0.5
    assert (abs(found.mean(0) - expected.mean(0)) < 6 * spread + 1e-6).all()
    np.testing.assert_allclose(found.std(0), expected.std(0), rtol=0.4, atol=1e-4)


@pytest.mark.parametrize(
    ("examples", "size", "drop_last"), [(20, 8, False), (23, 8, True), (5, 9, False)]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_plan_draws_what_a_loader_draws(
    examples: int, size: int, drop_last: bool, shuffle: bool
) -> None:
    """And the random state behind it is the loader's."""
    rows = torch.arange(examples)
    loader = DataLoader(TensorDataset(rows, rows), size, shuffle, drop_last=drop_last)
    plan = draw(Pairs(loader), 11, 7)
    assert plan.rows is not None
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(11)
    found = [x for x, _ in Replay(Pairs(loader), torch.device("cpu"), False).draw(7)]
    assert torch.equal(torch.get_rng_state(), plan.after)
    torch.set_rng_state(before)
    assert all(torch.equal(plan.batch(i)[0], x) for i, x in enumerate(found))


def test_wrong_arguments_are_refused() -> None:
    app = app_of(fr.FedAvgClient)()
    with pytest.raises(ValueError, match="memory must be a number of bytes"):
        fr.StackedGrid(app, 2, memory=0)
    with pytest.raises(ValueError, match="precision must be one of float32, bfloat16, not 'half'"):
        fr.StackedGrid(app, 2, precision="half")


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


def test_a_terms_noise_is_each_clients_own() -> None:
    """Else an average of many clients would have as much of it as one."""

    def correct(_: Any, grads: Any, params: Any, ctx: Any) -> Any:
        return {n: 1e3 * torch.randn_like(ctx.start[n]) for n in grads}

    kind = term("noise", correct=correct, elementwise=True)
    grid = Stacked(app_of(fr.RegClient, terms=[kind])(), len(SIZES))
    started(fr.RegStrategy([kind()], seed=3, fraction_evaluate=0.0), grid, perceptron)
    assert not grid.fallbacks
    updates = [m.content["arrays"]["0.bias"].numpy() for m in grid.replies[0].values()]
    assert len({a.tobytes() for a in updates}) == len(SIZES)


def test_losses_that_are_equal_go_in_one_stack() -> None:
    def client_fn(context: Any) -> Any:
        k = int(context.node_config["partition-id"])
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0 + k // 3, 0.5]))
        return fr.FedAvgClient(perceptron(), data_of(k), device="cpu", loss_fn=loss)

    grid = run(lambda: fr.client_app(client_fn))
    assert not grid.fallbacks


def test_the_parameter_of_an_entry_has_the_longest_name_and_the_same_shape() -> None:
    params = {"weight": torch.zeros(2), "0.weight": torch.zeros(2), "bias": torch.zeros(3)}
    two = torch.zeros(2)
    assert owner("U.0.weight", two, params) == "0.weight"
    assert owner("1.weight", two, params) == "weight"
    assert owner("0.weight", torch.zeros(1), params) is None
    assert owner("rate", two, params) is None


@pytest.mark.parametrize("order", ["C", "F"])
def test_slots_are_decoded_together_as_each_alone(order: Any) -> None:
    """And those that differ in what their records say do not go together."""

    def kept(k: int, dtype: str = "float32", wide: int = 2) -> Kept:
        rng = np.random.default_rng(k)
        arrays = {
            "matrix": np.asarray(rng.standard_normal((3, wide)), dtype, order=order),
            "number": np.asarray(rng.standard_normal(), dtype),
            "_orig_mod.whole": rng.integers(0, 9, (4,)),
        }
        return Kept(filled({n: to_array(a) for n, a in arrays.items()}))

    slots = [kept(k) for k in range(4)]
    assert len({slot.form for slot in slots}) == 1
    for key, rows in Kept.stacked(slots).items():
        assert torch.equal(rows, torch.stack([slot[key] for slot in slots]))
    assert len({kept(0).form, kept(0, "float64").form, kept(0, wide=3).form}) == 3


@pytest.mark.parametrize("on", [True, False])
def test_the_garbage_collector_is_left_alone(on: bool) -> None:
    seen: set[bool] = set()

    def client_fn(context: Any) -> Any:
        seen.add(gc.isenabled())
        k = int(context.node_config["partition-id"])
        return (OwnFit if k == 1 else fr.FedAvgClient)(perceptron(), data_of(k), device="cpu")

    (gc.enable if on else gc.disable)()
    try:
        started(
            fr.FedAvg(seed=3, fraction_evaluate=0.0),
            Stacked(fr.client_app(client_fn), len(SIZES)),
            perceptron,
        )
        assert gc.isenabled() == on
    finally:
        gc.enable()
    assert seen == {on}
