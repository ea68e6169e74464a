"""StackedGrid against InProcessGrid: what torch does otherwise under vmap, and what is called once for all.

Each case once gave other results in a stack, in silence.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flwr_regs as fr

MANY = 1024
from tests.flower.test_stacked import (
    SIZES,
    OneByOne,
    Stacked,
    app_of,
    data_of,
    in_double,
    perceptron,
    run,
)
from tests.flower.test_stacked_more import Given, term

cross_entropy = nn.functional.cross_entropy


def strategy_of(*terms: Any) -> Callable[[], Any]:
    return lambda: fr.RegStrategy([t() for t in terms], seed=3, fraction_evaluate=0.0)


# gradients: autograd is outside of vmap, so tensors inside seem to require none


def penalised(model: Any, x: Any) -> Any:
    """Its output depends on all that is trained."""
    some = sum(p.square().sum() for p in model.layer.parameters() if p.requires_grad)
    return model.layer(x) * (1 + some)


def by_type(model: Any, x: Any) -> Any:
    """Its output depends on all parameters."""
    some = sum(p.square().sum() for p in model.layer.parameters() if isinstance(p, nn.Parameter))
    return model.layer(x) * (1 + some)


def scaled_back(model: Any, x: Any) -> Any:
    """Scale a gradient on its way back."""
    hidden = model.layer[0](x)
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: 0.1 * grad)
    return model.layer[1](hidden)


def backward_hook() -> nn.Module:
    made = perceptron()
    made[1].register_full_backward_hook(
        lambda module, given, _: tuple(None if g is None else 0.1 * g for g in given)
    )
    return made


ASKS = "asks whether a tensor requires a gradient"
GRADIENTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "requires_grad": (lambda: Given(penalised), ASKS),
    "isinstance": (lambda: Given(by_type), ""),
    "hook on a tensor": (lambda: Given(scaled_back), ASKS),
    "hook on a module": (backward_hook, ASKS),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_model_that_looks_at_its_gradients_gives_the_same(name: str) -> None:
    model, why = GRADIENTS[name]

    def app() -> Any:
        one = model()  # else hooks are each client's own
        return app_of(fr.FedAvgClient, lambda: one)()

    grid = run(app, model=model)
    assert all(why in reason for reason in grid.fallbacks)
    assert bool(grid.fallbacks) == bool(why)


def test_a_loss_that_reads_the_model_gives_the_same() -> None:
    def app() -> Any:
        one = perceptron()

        def loss(output: Any, targets: Any) -> Any:
            return cross_entropy(output, targets) + 0.1 * sum(
                p.square().sum() for p in one.parameters()
            )

        return app_of(fr.FedAvgClient, lambda: one, loss_fn=loss)()

    assert set(run(app).fallbacks) == {"its loss or method reads the model by itself"}


def branching() -> nn.Module:
    made = Given(lambda model, x: model.layer(x) + (model.more(x) if len(x) > 4 else 0))
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(3)
        made.more = nn.Linear(6, 3)
    return made


def test_a_private_layer_that_some_batches_use_gives_the_same() -> None:
    """The others do not decay its weights."""
    grid = run(
        app_of(fr.RegClient, branching, terms=[fr.Private], private="more*"),
        model=branching,
        strategy=lambda: fr.RegStrategy([fr.Private("more*")], seed=3, fraction_evaluate=0.0),
        config={"weight-decay": 0.1},
    )
    assert set(grid.fallbacks) == {"the loss depends on more.weight in some batches only"}


# what changes as it runs


class Warm(nn.Module):
    """A loss that grows with its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Any, targets: Any) -> Any:
        """Return the loss."""
        self.calls += 1
        return cross_entropy(output, targets) * min(1, self.calls / 20)


class WarmObject:
    """A loss that is no module."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, output: Any, targets: Any) -> Any:
        """Return the loss."""
        self.seen.append(len(targets))
        return cross_entropy(output, targets) * min(1, len(self.seen) / 20)


class Smoothed(nn.Module):
    """A loss over its own moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Any, targets: Any) -> Any:
        """Return the loss."""
        loss = cross_entropy(output, targets)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / (1 + self.mean)


def warm_closure() -> Any:
    calls = 0

    def loss(output: Any, targets: Any) -> Any:
        nonlocal calls
        calls += 1
        return cross_entropy(output, targets) * min(1, calls / 20)

    return loss


CALLS = 0


def warm_global() -> Any:
    def loss(output: Any, targets: Any) -> Any:
        global CALLS
        CALLS += 1
        return cross_entropy(output, targets) * min(1, CALLS / 20)

    return loss


LOSSES = {
    "module": Warm,
    "object": WarmObject,
    "buffer": Smoothed,
    "closure": warm_closure,
    "global": warm_global,
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_counts_its_calls_gives_the_same(name: str, shared: bool) -> None:
    def app() -> Any:
        one, kept = LOSSES[name](), dict[int, Any]()

        def client_fn(context: Any) -> Any:
            k = int(context.node_config["partition-id"])
            if k not in kept:
                loss = one if shared or name == "global" else LOSSES[name]()
                kept[k] = fr.FedAvgClient(perceptron(), data_of(k), device="cpu", loss_fn=loss)
            return kept[k]

        return fr.client_app(client_fn)

    def strategy() -> Any:
        global CALLS
        CALLS = 0
        return fr.FedAvg(seed=3, fraction_evaluate=0.0)

    assert run(app, strategy=strategy).fallbacks


class Schedule:
    """A factor that falls with each use."""

    def __init__(self) -> None:
        self.uses = 0

    def next(self) -> float:
        """Return the factor."""
        self.uses += 1
        return 1 / self.uses**0.5


def test_a_schedule_in_a_shared_model_gives_the_same() -> None:
    def model() -> nn.Module:
        made = Given(lambda model, x: model.layer(x) * model.factor.next())
        made.factor = Schedule()  # type: ignore[assignment]
        return made

    def app() -> Any:
        one = model()
        return app_of(fr.FedAvgClient, lambda: one)()

    assert set(run(app, model=model).fallbacks) == {"its model changes its own attributes"}


def test_inputs_that_a_model_changes_are_each_clients_own() -> None:
    """They are a list's, and so those of the next pass too."""

    def listed(k: int, shuffle: bool = True) -> Any:
        return [(x.clone(), y) for x, y in data_of(k, False)]

    def model() -> nn.Module:
        return Given(lambda model, x: model.layer(x.mul_(0.5)))

    grid = run(
        app_of(fr.FedAvgClient, model, loader=listed), model=model, config={"local-epochs": 2}
    )
    assert set(grid.fallbacks) == {"its model changes its inputs"}


def test_private_entries_that_a_model_changes_give_the_same() -> None:
    def averaging(model: Any, x: Any) -> Any:
        with torch.no_grad():
            model.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return model.layer(x * model.mean)

    def model() -> nn.Module:
        made = Given(averaging)
        made.mean = nn.Parameter(torch.ones(6), requires_grad=False)
        return made

    grid = run(
        app_of(fr.RegClient, model, terms=[fr.Private], private="mean"),
        model=model,
        strategy=lambda: fr.RegStrategy([fr.Private("mean")], seed=3, fraction_evaluate=0.0),
    )
    assert set(grid.fallbacks) == {"its model changes its parameters in the forward pass"}


# errors


def failing(model: Callable[[], nn.Module], loader: Any, **settings: Any) -> Stacked:
    """Train on both grids; the same clients fail. Return the stacked one."""
    failed = []
    for kind in (OneByOne, Stacked):
        strategy = fr.FedAvg(seed=3, fraction_evaluate=0.0)
        grid = kind(app_of(fr.FedAvgClient, model, loader=loader, **settings)(), len(SIZES))
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model().state_dict()),
            num_rounds=1,
            train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
        )
        failed.append(strategy.history[0]["failures"])
    assert failed[0] == failed[1]
    assert sorted(failed[0]) == [1]
    return grid  # type: ignore[return-value]


class Words(nn.Module):
    """An embedding."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(0)
            self.words, self.head = nn.Embedding(10, 4), nn.Linear(24, 3)
        self.padding = padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        if self.padding is not None:
            x = (x * 3).long().clamp(-4, 5) + 4
        found = nn.functional.embedding(x, self.words.weight, padding_idx=self.padding)
        return self.head(found.flatten(1))


@pytest.mark.parametrize("index", [10, 12, -1])
def test_no_client_reads_the_embedding_of_another(index: int) -> None:
    """By itself it fails for an index that there is not."""

    def words(k: int, shuffle: bool = True) -> Any:
        x, y = data_of(k).dataset.tensors  # type: ignore[attr-defined]
        x = (x * 1.5).long().clamp(-4, 5) + 4
        x[0, 0] = index if k == 1 else 0
        return DataLoader(TensorDataset(x, y), 8)

    assert failing(Words, words).fallbacks


@pytest.mark.parametrize("padding", [4, -6])
def test_padding_that_a_function_is_given_is_not_trained(padding: int) -> None:
    def model() -> nn.Module:
        return Words(padding)

    assert not run(app_of(fr.FedAvgClient, model), model=model).fallbacks


@pytest.mark.parametrize("label", [3, -1])
def test_a_class_that_there_is_not_is_an_error(label: int) -> None:
    def loss(output: Any, targets: Any) -> Any:
        return nn.functional.mse_loss(output, nn.functional.one_hot(targets, 3).float())

    def loader(k: int, shuffle: bool = True) -> Any:
        x, y = data_of(k).dataset.tensors  # type: ignore[attr-defined]
        return DataLoader(
            TensorDataset(x, torch.where(torch.arange(len(y)) == 9, label, y) if k == 1 else y), 8
        )

    assert failing(perceptron, loader, loss_fn=loss).fallbacks


def test_a_buffer_of_another_shape_is_an_error() -> None:
    """It has as many entries as there are clients, so that a number of each would go into all."""

    def model() -> nn.Module:
        def odd(model: Any, x: Any) -> Any:
            if model.training and x[0, 0].dtype == torch.float32:
                model.several = x.mean()
            return model.layer(x)

        made = Given(odd)
        made.register_buffer("several", torch.zeros(len(SIZES)))
        return made

    made = app_of(fr.FedAvgClient, model, loader=lambda k, **_: data_of(0, False))
    grid = Stacked(made(), len(SIZES))
    with pytest.raises(Exception, match=r"array 'several' has shape \(\)"):
        fr.FedAvg(seed=3, fraction_evaluate=0.0).start(
            grid=grid,
            initial_arrays=ArrayRecord(model().state_dict()),
            num_rounds=1,
            train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
        )


# random numbers


def own_generator(grads: Any) -> Any:
    draws = torch.Generator().manual_seed(5)
    return {n: g * (torch.rand(g.shape, generator=draws) < 0.5) for n, g in grads.items()}


def seeded_anew(grads: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return {n: g * (torch.rand(g.shape) < 0.5) for n, g in grads.items()}


@pytest.mark.parametrize("draws", [own_generator, seeded_anew])
@pytest.mark.parametrize("hook", ["correct", "elementwise", "finish"])
def test_numbers_of_a_seed_that_all_clients_have_are_the_same_for_all(
    draws: Any, hook: str
) -> None:
    """Such as a random projection that the server knows too."""

    def correct(_: Any, grads: Any, params: Any, ctx: Any) -> Any:
        return draws(grads)

    def finish(_: Any, delta: Any, ctx: Any) -> Any:
        return draws(delta), {}, {}

    hooks = {"finish": finish} if hook == "finish" else {"correct": correct}
    kind = term("drawn", **hooks, **({"elementwise": True} if hook == "elementwise" else {}))
    run(app_of(fr.RegClient, terms=[kind]), strategy=strategy_of(kind))


NUMPYS, PYTHONS = np.random.default_rng(0), random.Random(0)
OWN = {"numpy": lambda: NUMPYS.normal(), "random": lambda: PYTHONS.gauss(0, 1)}


@pytest.mark.parametrize("drawn", OWN)
def test_noise_of_an_own_generator_is_each_clients_own(drawn: str) -> None:
    def correct(_: Any, grads: Any, params: Any, ctx: Any) -> Any:
        return {n: g + 1e3 * float(OWN[drawn]()) for n, g in grads.items()}

    kind = term("noise", correct=correct)
    made = app_of(fr.RegClient, loader=lambda k, **_: data_of(0, False), terms=[kind])
    grid = Stacked(made(), len(SIZES))
    strategy_of(kind)().start(
        grid=grid,
        initial_arrays=ArrayRecord(perceptron().state_dict()),
        num_rounds=1,
        train_config=ConfigRecord({"lr": 0.1, "local-steps": 1}),
    )
    found = [m.content["arrays"]["0.bias"].numpy() for m in grid.replies[0].values()]
    assert len({a.tobytes() for a in found}) == len(SIZES)


def test_a_number_made_of_an_id_is_no_key_either() -> None:
    def finish(_: Any, delta: Any, ctx: Any) -> Any:
        return {n: -d if ctx.client_id % 3 in {1} else d for n, d in delta.items()}, {}, {}

    kind = term("modulo", finish=finish)
    run(app_of(fr.RegClient, terms=[kind]), strategy=strategy_of(kind))


# what several clients share


@pytest.mark.parametrize("models", [1, 2])
def test_private_entries_of_one_model_for_all_give_the_same(models: int) -> None:
    """By itself, a client without private entries of its own begins with those of the one before."""

    def model() -> nn.Module:
        return perceptron(nn.BatchNorm1d(8)).double()

    def app() -> Any:
        all_of_them = [model() for _ in range(models)]

        def client_fn(context: Any) -> Any:
            k = int(context.node_config["partition-id"])
            loader = in_double(data_of(k))
            return fr.FedBNClient(all_of_them[k % models], loader, device="cpu")

        return fr.client_app(client_fn)

    grid = run(
        app,
        model=model,
        strategy=lambda: fr.FedBN(seed=3, fraction_train=0.6, fraction_evaluate=0.0),
    )
    assert grid.fallbacks


def test_attributes_that_a_shared_model_is_given_are_each_clients_own() -> None:
    def scaled(model: Any, x: Any) -> Any:
        return model.layer(x) * model.factor

    def app() -> Any:
        one = Given(scaled)

        def client_fn(context: Any) -> Any:
            k = int(context.node_config["partition-id"])
            one.factor = 1.0 + k // 2  # type: ignore[assignment]
            return fr.FedAvgClient(one, data_of(k), device="cpu")

        return fr.client_app(client_fn)

    assert run(app, model=lambda: Given(scaled)).fallbacks


SETTINGS = {"factor": 1.0}


def by_settings(output: Any, targets: Any) -> Any:
    return SETTINGS["factor"] * cross_entropy(output, targets)


def rate_by_settings(params: Any, lr: float) -> Any:
    return torch.optim.SGD(params, lr=lr * SETTINGS["factor"])


@pytest.mark.parametrize(
    "given", [{"loss_fn": by_settings}, {"optimizer": rate_by_settings}], ids=["loss", "optimiser"]
)
def test_settings_that_are_made_for_each_client_are_its_own(given: Any) -> None:
    def client_fn(context: Any) -> Any:
        k = int(context.node_config["partition-id"])
        SETTINGS["factor"] = 1.0 + k
        return fr.FedAvgClient(perceptron(), data_of(k), device="cpu", **given)

    assert run(lambda: fr.client_app(client_fn)).fallbacks


class Switched(torch.utils.data.Dataset[Any]):
    """The data of the client that was made last."""

    client = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        """Return an example."""
        x, y = data_of(self.client).dataset.tensors  # type: ignore[attr-defined]
        return x[i % len(x)], y[i % len(x)]


METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "FedAvg": (fr.FedAvg, fr.FedAvgClient, {}),
    "FedCurv": (fr.FedCurv, fr.FedCurvClient, {"lam": 0.5}),
    "FedRS": (fr.FedRS, fr.FedRSClient, {}),
    "RFedAvgPlus": (fr.RFedAvgPlus, fr.RFedAvgPlusClient, {"lam": 0.5}),
}


@pytest.mark.parametrize("optimizer", ["SGD", "LBFGS"])
@pytest.mark.parametrize("how", ["attribute", "tensors", "in place"])
@pytest.mark.parametrize("method", ["FedAvg", "FedCurv"])
def test_one_data_set_that_is_switched_between_clients_gives_the_same(
    method: str, how: str, optimizer: str
) -> None:
    strategy, client, settings = METHODS[method]

    def app() -> Any:
        plain = TensorDataset(torch.empty(20, 6), torch.empty(20, dtype=torch.long))
        data: Any = Switched() if how == "attribute" else plain

        def client_fn(context: Any) -> Any:
            k = int(context.node_config["partition-id"])
            data.client = k
            rows = torch.arange(20) % SIZES[k]
            mine = [t[rows] for t in data_of(k).dataset.tensors]  # type: ignore[attr-defined]
            if how == "tensors":
                data.tensors = tuple(mine)
            if how == "in place":
                for kept, t in zip(data.tensors, mine, strict=True):
                    kept.copy_(t)
            return client(perceptron(), DataLoader(data, 8, shuffle=True), device="cpu")

        return fr.client_app(client_fn)

    run(
        app,
        strategy=lambda: strategy(seed=3, fraction_evaluate=0.0, **settings),
        config={"optimizer": optimizer},
    )


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from a generator of its own."""

    def __init__(self, k: int) -> None:
        self.pairs, self.draws = data_of(k).dataset, np.random.default_rng(k)

    def __len__(self) -> int:
        return len(self.pairs)  # type: ignore[arg-type]

    def __getitem__(self, i: int) -> Any:
        """Return an example, changed a little."""
        x, y = self.pairs[i]
        return x + 0.1 * torch.tensor(self.draws.normal(size=6)).float(), y


class Shuffled:
    """A sampler with a generator of its own."""

    def __init__(self, k: int) -> None:
        self.size, self.draws = SIZES[k], random.Random(k)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return iter(self.draws.sample(range(self.size), self.size))


class InPlace:
    """A sampler that shuffles a list of its own."""

    def __init__(self, k: int, length: int) -> None:
        self.order, self.rounds = list(range(length)), k

    def __len__(self) -> int:
        return SIZES[0] // 2

    def __iter__(self) -> Any:
        self.order.append(self.order.pop(0))
        return iter([i % 10 for i in self.order[: len(self)]])


class Buffered:
    """Batches that are written into the same memory."""

    def __init__(self, k: int, kind: str) -> None:
        self.pairs = list(data_of(k, False, 4))[:5]
        self.numpy = kind == "numpy"
        self.x, self.y = torch.empty(4, 6), torch.empty(4, dtype=torch.long)
        self.array = np.empty((4, 6), "f")

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Any:
        for x, y in self.pairs:
            self.x[: len(x)] = x
            self.array[: len(x)] = x.numpy()
            yield (torch.from_numpy(self.array) if self.numpy else self.x)[: len(y)], y


DATA: dict[str, Any] = {
    "augmented": lambda k: DataLoader(Noisy(k), 8, shuffle=True),
    "sampled": lambda k: DataLoader(data_of(k).dataset, 8, sampler=Shuffled(k)),
    "in place": lambda k: DataLoader(data_of(k).dataset, 8, sampler=InPlace(k, 150)),
    "long": lambda k: DataLoader(data_of(k).dataset, 8, sampler=InPlace(k, MANY + 150)),
    "buffered": lambda k: Buffered(k, "torch"),
    "numpy": lambda k: Buffered(k, "numpy"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", DATA)
def test_data_that_change_as_they_are_drawn_give_the_same(name: str, method: str) -> None:
    """The clients keep their loaders."""
    strategy, client, settings = METHODS[method]

    def app() -> Any:
        loaders = [DATA[name](k) for k in range(len(SIZES))]

        def client_fn(context: Any) -> Any:
            k = int(context.node_config["partition-id"])
            return client(perceptron(), loaders[k], device="cpu")

        return fr.client_app(client_fn)

    grid = run(app, strategy=lambda: strategy(seed=3, fraction_evaluate=0.0, **settings))
    assert grid.fallbacks


# optimisers


def fused(params: Any, lr: float) -> Any:
    return torch.optim.Adam(params, lr=lr, fused=True)


def hooking(params: Any, lr: float) -> Any:
    mine = list(params)
    for p in mine:
        p.register_hook(lambda grad: 0.1 * grad)
    return torch.optim.SGD(mine, lr=lr)


def zeroing(params: Any, lr: float) -> Any:
    mine = list(params)
    with torch.no_grad():
        mine[0].zero_()
    return torch.optim.SGD(mine, lr=lr)


def by_attribute(params: Any, lr: float) -> Any:
    return torch.optim.SGD([{"params": [p], "lr": lr * getattr(p, "scale", 1.0)} for p in params])


CHANGES = "its optimiser's factory changes the parameters"


@pytest.mark.parametrize(
    ("factory", "why"), [(fused, ""), (hooking, CHANGES), (zeroing, CHANGES), (by_attribute, "")]
)
def test_an_optimisers_factory_gives_the_same(factory: Any, why: str) -> None:
    def model() -> nn.Module:
        made = perceptron()
        made[1].weight.scale = 0.1
        return made

    grid = run(app_of(fr.FedAvgClient, model, optimizer=factory), model=model)
    assert set(grid.fallbacks) == ({why} if why else set())


@pytest.mark.parametrize("kind", [fr.InProcessGrid, fr.StackedGrid])
def test_a_snapshot_is_not_changed_by_what_comes_after_it_is_restored(kind: Any) -> None:
    grid = kind(app_of(fr.SCAFFOLDClient)(), len(SIZES))

    def train() -> None:
        fr.SCAFFOLD(seed=3, fraction_evaluate=0.0).start(
            grid=grid,
            initial_arrays=ArrayRecord(perceptron().state_dict()),
            num_rounds=1,
            train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
        )

    def held(snapshot: Any) -> Any:
        return {node: {k: list(r) for k, r in state.items()} for node, state in snapshot.items()}

    train()
    snapshot = grid.snapshot()
    before = held(snapshot)
    grid.restore(snapshot)
    train()
    assert held(snapshot) == before
    grid.restore(snapshot)
    assert held(grid.snapshot()) == before


class CountingAll(nn.Module):
    """A model that counts the calls of all models of its class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        CountingAll.calls += 1
        return self.layer(x) / (1 + CountingAll.calls % 2)


def test_a_class_that_counts_gives_the_same() -> None:
    def strategy() -> Any:
        CountingAll.calls = 0
        return fr.FedAvg(seed=3, fraction_evaluate=0.0)

    grid = run(app_of(fr.FedAvgClient, CountingAll), model=CountingAll, strategy=strategy)
    assert set(grid.fallbacks) == {"its model changes its own attributes"}


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_that_change_in_eval_mode_give_the_same(in_place: bool) -> None:
    """A teacher's too, which counts its own calls."""

    def counting(model: Any, x: Any) -> Any:
        if in_place:
            model.count.add_(1)
        else:
            model.count = model.count + 1
        return model.layer(x) * (1 + 0.01 * model.count)

    def model() -> nn.Module:
        made = Given(counting)
        made.register_buffer("count", torch.zeros(()))
        return made

    grid = run(
        app_of(fr.FedNTDClient, model),
        model=model,
        strategy=lambda: fr.FedNTD(seed=3, fraction_evaluate=0.0),
    )
    assert grid.fallbacks
