"""A stack is its clients one by one: the same replies, states and histories, up to rounding."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flwr_regs as fr
from flwr_regs.abilities import Carries, Evolves, Perturbs
from flwr_regs.cohort.stack_groups import Group
from flwr_regs.cohort.stacked_training import Stack
from flwr_regs.cohort.stacks import ALONE
from tests.conftest import Log, drawn, noted
from tests.flower import stacks
from tests.flower.stacks import SIZES, Cohort, Model, Stacked, compare, data_of, pair, perceptron


class Tied(nn.Module):
    """A frozen layer, a weight with two names, a buffer that does not travel, and one that counts."""

    def __init__(self) -> None:
        super().__init__()
        with drawn(1):
            self.first, self.hold = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
            self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((6,), 0.9), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        self.seen = self.seen + len(x) * self.training
        return self.head(torch.tanh(self.second(self.hold(self.first(x) * self.scale))))


class Widening(Tied):
    """A buffer that a forward pass makes wider."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        self.seen = self.seen.double()
        return super().forward(x)


class Words(nn.Module):
    """An embedding whose entry for padding is not trained."""

    def __init__(self) -> None:
        super().__init__()
        with drawn():
            self.words = nn.Embedding(10, 4, padding_idx=4)
            self.head = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(24, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        indices = (x * 3).long().clamp(-4, 5) + 4 if x.is_floating_point() else x
        return self.head(self.words(indices))


def twice() -> Model:
    """Return a model that has layers under two names."""
    model = Model(lambda m, x: m.layer(x), nn.BatchNorm1d(8), nn.Tanh())
    model.first, model.norm = model.layer[0], model.layer[1]
    return model


def scalar(function: Any = lambda m, x: m.layer(x) * m.scale + m.none.sum()) -> Model:
    """Return a model with a parameter without dimensions, and one without entries."""
    model = Model(function)
    model.scale, model.none = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0, 2))
    return model


def aliased() -> Model:
    """Return a model with two parameters in the same memory: a step of one moves both."""
    model = Model(lambda m, x: m.layer(x) * m.scale + m.shift)
    model.scale = nn.Parameter(torch.ones(3))
    model.shift = nn.Parameter(model.scale.data[1:2])
    return model


class Named(Model):
    """A model of two named inputs, which computes its own loss."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, labels: Any = None) -> Any:  # type: ignore[override]
        """Return the loss and the logits."""
        logits = self.layer(x * weight)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def in_dicts(k: int, shuffle: bool = True) -> list[dict[str, Any]]:
    """Return a client's batches as mappings."""
    x, y = pair(k)
    batches = zip(x.split(8), y.split(8), strict=True)
    return [{"x": a, "weight": torch.ones(len(a), 1) * 0.5, "labels": b} for a, b in batches]


def convolving() -> nn.Sequential:
    """Return a model with a convolution."""
    with drawn():
        return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 1, 4), nn.Flatten())


def normed(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a model with BatchNorm, and no bias before it, whose gradient would be rounding alone."""
    model = perceptron(nn.BatchNorm1d(8))
    model[0].bias = None
    return model.to(dtype)


def altered(change: Any) -> Any:
    """Return what makes a client's loader, of data that are as ``change(k, x, y)`` returns them."""

    def loader(k: int, shuffle: bool = True) -> DataLoader[Any]:
        data = TensorDataset(*change(k, *pair(k)))
        return DataLoader(data, 8, shuffle)

    return loader


in_double = altered(lambda k, x, y: (x.double(), y))  # for methods in which rounding grows
few_classes = altered(lambda k, x, y: (x, y.clamp(max=k % 3)))
some_ignored = altered(lambda k, x, y: (x, torch.where(torch.arange(len(y)) % 20 == 0, -100, y)))
one_wrong_class = altered(lambda k, x, y: (x, y + 3 * (torch.arange(len(y)) == 3) * (k == 4)))


def five_classes() -> nn.Module:
    """Return a model of more classes than there are labels."""
    with drawn():
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))


def grouped(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return an optimiser that treats weights and biases in different ways."""
    given = list(parameters)
    weights = {"params": [p for p in given if p.ndim > 1], "weight_decay": 0.1}
    biases = {"params": [p for p in given if p.ndim < 2]}
    return torch.optim.SGD([weights, biases], lr=lr, momentum=0.5, nesterov=True)


# terms


@dataclass(frozen=True)
class Reading(fr.Term):
    """Reads what differs between clients in one of its hooks: ids, label counts, the loss of all data."""

    name: ClassVar[str] = "reading"
    what: str = ""

    @property
    def needs(self) -> Any:
        return ("label_counts",) if self.what.startswith("counts") else ()

    def start(self, params: Any, ctx: Any) -> Any:
        if self.what != "counts at the start":
            return params
        return {n: p * (1 + 0.01 * ctx.label_counts.float().mean()) for n, p in params.items()}

    def loss(self, base: Any, params: Any, ctx: Any) -> Any:
        return base * ({1: 2.0}.get(ctx.client_id, 1.0) if self.what == "id in a dict" else 1.0)

    def finish(self, delta: Any, ctx: Any) -> Any:
        match self.what:
            case "loss at the end":
                loss = ctx.mean_loss(ctx.start)
                return {n: 0.5 * d * loss / loss for n, d in delta.items()}, {"loss": loss}, {}
            case "counts at the end":
                return delta, {"n": ctx.label_counts * ctx.mean_loss(ctx.start)}, {}
            case "steps":
                numbers = {"steps": ctx.num_steps, "third": ctx.num_steps / 3, "half": 0.5}
                precise = {"n": torch.ones(()) * ctx.num_steps, "is": True}
                first, *_ = delta
                sent = {**delta, first: 0.0}
                return sent, {**numbers, **precise}, {"rounds": ctx.client.get("rounds", 0) + 1}
        return delta, {}, {}


@dataclass(frozen=True)
class Pushed(fr.Term, Perturbs, Evolves):
    """Takes gradients where some parameters are elsewhere, one of them at a number; counts the steps."""

    name: ClassVar[str] = "pushed"

    def point(self, params: Any, ctx: Any) -> Any:
        first, second, *_ = params
        return {first: params[first] + 0.1, second: 0.1}

    def evolve(self, grads: Any, params: Any, ctx: Any) -> Any:
        return {"steps": ctx.client.get("steps", 0) + 1}


@dataclass(frozen=True)
class Odd(fr.Term):
    """Reads, in an elementwise correction, what differs between clients."""

    name: ClassVar[str] = "odd"
    elementwise: ClassVar[bool] = True
    reads: str = ""

    def correct(self, grads: Any, params: Any, ctx: Any) -> Any:
        """Return the gradients, plus some of what is read; or noise."""
        if self.reads == "noise":
            return {n: 1e3 * torch.randn_like(ctx.start[n]) for n in grads}
        if self.reads == "nothing":
            return {n: torch.ones_like(ctx.start[n]) for n in grads}
        value = getattr(ctx, self.reads)
        more = value.float().mean() if self.reads == "output" else value
        return {n: g + 0.01 * more for n, g in grads.items()}


# the law


def by_one_hot(output: torch.Tensor, targets: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output, nn.functional.one_hot(targets, 3).float())


def over_all(method: str, **given: Any) -> Cohort:
    """Return a case of a method that asks for all data at the end, some of which are of one size."""

    def loader(k: int, shuffle: bool = True) -> Any:
        g, n = torch.Generator().manual_seed(k), (20, 23)[k % 2]
        data = TensorDataset(torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g))
        return DataLoader(data, 8, shuffle) if "delta_batches" in given else [*DataLoader(data, 8)]

    how = {"config": {"local-steps": 4}, "grid": {"check": False}}
    return Cohort(method, given, model=partial(normed, torch.float32), loader=loader, **how)


BUDGETS = {"step_budget": lambda k: k + 1}
TWO_EPOCHS = {"local-epochs": 2}
SOME = {"fraction_train": 0.8}
SAME: dict[str, Cohort] = {
    "steps": Cohort("FedProx", {"mu": 0.3, **SOME}, config={"local-steps": 7}),
    "steps from another point": Cohort("FedLESAM", {"rho": 0.1, **SOME}, rounds=3),
    "some parameters from another point": Cohort(terms=[Pushed()]),
    "momentum": Cohort("FedFOR", SOME, config={"momentum": 0.9, "weight-decay": 0.01}),
    "clipped numbers": Cohort("FedDyn", {"alpha": 0.2}, model=scalar, config={"clip-norm": 0.1}),
    "Adam": Cohort("FedSAM", {"rho": 0.1, **SOME}, config={"optimizer": "Adam", **TWO_EPOCHS}),
    "Adagrad": Cohort(
        model=lambda: perceptron().double(), loader=in_double, config={"optimizer": "Adagrad"}
    ),
    "an optimiser of one's own": Cohort("FedProx", {"mu": 0.3}, settings={"optimizer": grouped}),
    **{
        f"{kind}, kept": Cohort(
            settings={"keep_optimizer": True, "optimizer": partial(getattr(torch.optim, kind))},
            config={"local-steps": 5},
            rounds=3,
        )
        for kind in ("Adam", "NAdam", "Rprop")
    },
    "second moments that travel": Cohort("FedAdamW", SOME, settings=BUDGETS, config=TWO_EPOCHS),
    "budgets": Cohort("FedADCPlus", SOME, settings=BUDGETS, config=TWO_EPOCHS),
    "budgets and slots": Cohort("SCAFFOLD", SOME, settings=BUDGETS, config=TWO_EPOCHS),
    "slots that change in each step": Cohort("FedSMOO", SOME, settings=BUDGETS, config=TWO_EPOCHS),
    "BatchNorm": Cohort("FedBN", SOME, model=normed, loader=in_double, rounds=3),
    "private": Cohort(terms=[fr.Private("1.*")], given=SOME, settings={"private": "1.*"}, rounds=4),
    "in order": Cohort("RFedAvgPlus", {"lam": 0.3}, loader=lambda k, **_: data_of(k, False)),
    "drop_last": Cohort(
        "MimeLite", loader=lambda k, **_: DataLoader(data_of(k).dataset, 8, True, drop_last=True)
    ),
    "numbers of steps": Cohort("FedCM", {"alpha": 0.3}, config=TWO_EPOCHS),
    "own model": Cohort("Ditto", {"lam": 0.2, **SOME}, settings={"loss_fn": by_one_hot}),
    "the client's last model": Cohort("MOON", {"mu": 1.0, **SOME}, rounds=3),
    "the global model's output": Cohort("FedNTD"),
    "tied and frozen": Cohort(model=Tied),
    "dicts": Cohort(model=partial(Named, None), loader=in_dicts, settings={"loss_fn": None}),
    "padding": Cohort(model=Words),
    "told to some clients alone": Cohort("EFL", {"lam": 0.5, "sums_every": 2, **SOME}, rounds=4),
    "a layer with two names": Cohort(model=twice),
    "ignored targets": Cohort("EFL", {"lam": 0.5}, loader=some_ignored),
    **{
        what: Cohort(terms=[Reading(what)], model=five_classes, loader=few_classes)
        for what in ("counts at the start", "counts at the end", "loss at the end")
    },
    "counts in a first exchange": Cohort(
        terms=[Reading("counts at the end"), fr.LeaveOneOutMean(0.3)],
        model=five_classes,
        loader=few_classes,
    ),
    **{
        f"first exchange, {term.name}": Cohort(
            terms=[fr.LocalBatchNorm(), term],
            given=SOME,
            model=partial(normed, torch.float32),
            settings={"step_budget": lambda k: k + 2},
            config=TWO_EPOCHS,
            rounds=3,
        )
        for term in (fr.LeaveOneOutMean(0.3, delta_batches=2), fr.CorrectedMomentum(0.9))
    },
    "half precision": Cohort(given={"wire_dtype": "bfloat16", **SOME}),
    "a delta downlink": Cohort("FedFOR", {"downlink": "delta", **SOME}, rounds=4),
    "coded both ways": Cohort(
        "EFL", {"lam": 0.1, "density_up": 0.3, "density_down": 0.3, **SOME}, rounds=4
    ),
    "mean_features": over_all("RFedAvg", lam=0.3, delta_batches=2),
    "fisher": over_all("EFL", lam=0.5, density_up=0.3, fisher_samples=11),
    "fisher of all": over_all("FedCurv", lam=0.5),
    "mean_loss": over_all("QFedAvg", q=1.0),
    "mean_gradient": over_all("SCAFFOLD", option=1),
}
"""Situations, each with a method in which it matters; loaders shuffle, and data are of unequal length."""


@pytest.fixture
def also_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stacks first train on torch's device without numbers: what they read before the end raises."""
    plain = Group.run

    def run(group: Group, given: Any = None) -> Any:
        second = group.recipe.config["server-round"] == 2  # methods have sent something by then
        # who carries an optimiser's state reads it once, before the steps
        if given is None and second and not group.view.term.able(Carries):
            model, meta = deepcopy(group.view.model).to("meta"), torch.device("meta")
            members = sorted(group.members, key=lambda m: -len(m.plan))
            stack = Stack(replace(group.view, model=model, device=meta, misread=[]), members)
            with pytest.raises(NotImplementedError, match="no data") as end:
                (stack.probe if group.recipe.probes else stack.run)()
            assert {"_finish", "probe"} & {entry.name for entry in end.traceback}
        return plain(group, given)

    monkeypatch.setattr(Group, "run", run)


@pytest.mark.usefixtures("also_elsewhere")
@pytest.mark.parametrize("name", SAME)
def test_a_stack_is_its_clients_one_by_one(name: str) -> None:
    assert not compare(SAME[name]).fallbacks


@pytest.mark.parametrize("reads", ["num_steps", "nothing"])
def test_an_elementwise_term_may_read_numbers_that_differ_between_clients(reads: str) -> None:
    assert not compare(Cohort(terms=[Odd(reads)], grid={"check": False})).fallbacks


def test_a_stack_in_float64_is_as_near_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "TOLERANCE", 1e-12)
    terms, model = [Reading("steps")], lambda: perceptron().double()
    assert not compare(Cohort(terms=terms, model=model, loader=in_double)).fallbacks


# one by one


class OwnFit(fr.FedAvgClient):
    """A client with a `fit` of its own."""

    def fit(self, parameters: Any, config: Any) -> Any:
        """Train as every client does."""
        return super().fit(parameters, config)


def with_generator(k: int, shuffle: bool = True) -> DataLoader[Any]:
    """Return a loader that shuffles by a generator of its own."""
    return DataLoader(data_of(k).dataset, 8, shuffle, generator=torch.Generator().manual_seed(k))


def bounding(model: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        model.layer[0].weight.clamp_(-0.38, 0.38)
    return model.layer(x)


def filling(output: torch.Tensor, targets: Any) -> torch.Tensor:
    return output.index_fill(0, targets[:1] - 1, 0.0).square().mean()


class Streamed:
    """Batches in a new order each time, without a length."""

    def __init__(self, k: int, shuffle: bool = True) -> None:
        self.x, self.y = pair(k)

    def __iter__(self) -> Iterator[Any]:
        for rows in torch.randperm(len(self.x)).split(8):
            yield self.x[rows], self.y[rows]


def hooked() -> nn.Module:
    model = perceptron()
    model.get_parameter("0.bias").register_hook(lambda grad: 0.5 * grad)
    return model


def drawn_rate(params: Any, lr: float) -> Any:
    """Return an optimiser whose learning rate is drawn."""
    return torch.optim.SGD(params, lr=lr * (1 + float(torch.rand(()))))


def by_norm(params: Any, lr: float) -> Any:
    """Return an optimiser with a learning rate of its own for each parameter."""
    return torch.optim.SGD([{"params": [p], "lr": lr * float(p.detach().norm())} for p in params])


def holding(params: Any, lr: float) -> Any:
    """Return an optimiser that also holds a number of its own."""
    return torch.optim.SGD([*params, nn.Parameter(torch.zeros(1))], lr=lr)


Once = partial(Cohort, rounds=1)
Equal = partial(Once, config={"local-steps": 3})
Unchecked = partial(Once, grid={"check": False})
REASONS: dict[str, Cohort] = {
    "OwnFit has a fit of its own": Once(client=OwnFit),
    "the app has mods": Once(mods=[lambda message, context, call: call(message, context)]),
    "its loader has a random generator of its own": Once(loader=with_generator),
    "its loader has worker processes": Once(
        loader=lambda k, shuffle=True: DataLoader(data_of(k).dataset, 8, num_workers=1)
    ),
    "LBFGS is not known to treat each number alone": Once(config={"optimizer": "LBFGS"}),
    "['optimizer'] carry the state of an optimiser in which": Once(
        "FedADC", {"beta": 0.5}, settings={"keep_optimizer": True}
    ),
    "FedAvgClient has a compiled model": Once(
        model=lambda: torch.compile(perceptron(), backend="eager")
    ),
    "its model, loss or optimiser cannot be pickled": Once(
        model=lambda: nn.Sequential(*map(nn.utils.parametrizations.weight_norm, perceptron()))
    ),
    "FedAvgClient has a time_budget": Once(settings={"time_budget": 1e9}),
    "vmap": Once(model=partial(Model, lambda m, x: m.layer(x) if x.sum() > -1e9 else m.layer(-x))),
    "asks for train, which a stack has in `finish` or `probe` alone, and not `train` beside": Once(
        terms=[fr.Curvature(0.1), fr.PersonalModel(0.1)]
    ),
    "a term looks up a number that differs": Once(terms=[Reading("id in a dict")]),
    "its batches hold a SimpleNamespace": Once(
        model=partial(Model, lambda m, x: m.layer(x.x)),
        loader=lambda k, shuffle=False: [(SimpleNamespace(x=x), y) for x, y in data_of(k, False)],
    ),
    "'NoneType' object has no attribute 'float'": Equal(terms=[Odd("output")]),  # not elementwise
    "for *: 'float' and 'NoneType'": Equal(terms=[Odd("client_id")]),  # nor this
    "the loss does not depend on ['scale', 'none']": Once(
        terms=[fr.Private("none, scale")], model=partial(scalar, lambda m, x: m.layer(x))
    ),
    "its scale and shift lie in the same memory": Once(model=aliased),
    "its 0.bias has a hook on its gradient": Unchecked(model=hooked),
    "changes the shape or dtype of its buffer seen": Once(model=Widening),
    "its data have no length": Once(loader=Streamed),
    "its convolutions are slower in a stack on a CPU": Once(model=convolving),
    "its optimiser holds parameters that are not its": Once(settings={"optimizer": holding}),
    "its model or loss writes to its batches": Once(
        model=partial(Model, lambda m, x: m.layer(x.mul_(0.5))),
        loader=lambda k, **_: list(data_of(k, False)),
        config=TWO_EPOCHS,
    ),
    "its model or loss writes to its parameters": Unchecked(model=partial(Model, bounding)),
    "an embedding or one_hot gets an index that is out of range": Once(
        loader=one_wrong_class, settings={"loss_fn": by_one_hot}
    ),
    "index_fill may read other members' rows": Unchecked(settings={"loss_fn": filling}),
    "its optimiser's factory draws random numbers": Once(settings={"optimizer": drawn_rate}),
    "its optimiser's factory looks at values that": Once(
        "FedInit", {"beta": 0.1}, settings={"optimizer": by_norm}
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_cannot_stack_trains_one_by_one_and_says_why(reason: str, log: Log) -> None:
    grid = compare(REASONS[reason])
    assert sum(grid.fallbacks.values()) == len(SIZES)
    for (said,) in (grid.fallbacks, log("one by one")):
        assert reason in said


def test_clients_of_other_kinds_go_in_other_stacks() -> None:
    """Client 1 has another loss, 2 its own `fit`, and 3 another buffer that does not travel.

    The others' losses are equal, not the same.
    """

    def client_fn(context: Any) -> Any:
        k, model = int(context.node_config["partition-id"]), Tied()
        model.scale.mul_(1.0 - 0.5 * (k == 3))  # type: ignore[operator]
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0 + (k == 1), 0.5]))
        kind = OwnFit if k == 2 else fr.FedAvgClient
        return kind(model, data_of(k), device="cpu", loss_fn=loss)

    grid = compare(Cohort(model=Tied), lambda: fr.client_app(client_fn))
    assert grid.fallbacks == {ALONE: 4, "OwnFit has a fit of its own": 2}


def test_a_large_cohort_trains_in_several_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = noted(monkeypatch, Group, "run")
    two_models = 2 * (6 * 4 * 83 + 400)  # of 83 numbers
    assert not compare(Cohort(grid={"memory": two_models, "check": False})).fallbacks
    assert [len(group.members) for group, *_ in stacks] == [2, 2, 1, 2, 2, 1]


def test_a_client_that_fails_fails_as_by_itself() -> None:
    """Labels of 0 are int32, indices of 1 out of range; 2 fails in `client_fn`, its state as before.

    3 keeps to itself what the method would send.
    """

    def client_fn(context: Any) -> Any:
        k = int(context.node_config["partition-id"])
        before = context.state.config_records.get("calls", {"n": 0})["n"]
        context.state["calls"] = ConfigRecord({"n": before + 1})
        x, y = pair(k)
        x = (x * 1.5).long().clamp(-4, 5) + 4
        x[0, 0] = 12 if k == 1 else 0
        if k == 2:
            raise RuntimeError("no data here")
        y = y.int() if k == 0 else y
        more = {"private": "head.*"} if k == 3 else {}
        return fr.FedAvgClient(Words(), DataLoader(TensorDataset(x, y), 8), device="cpu", **more)

    results = []
    for kind in (fr.InProcessGrid, fr.StackedGrid):
        grid = kind(fr.client_app(client_fn), len(SIZES))
        strategy, _ = Cohort(model=Words).train(grid)
        results.append(strategy.history[0]["failures"])
        assert 1002 not in grid.snapshot()
    assert results[0] == results[1]
    assert sorted(results[0]) == [0, 1, 2, 3]


# random numbers


def test_each_client_has_a_dropout_mask_of_its_own() -> None:
    """Clients with the same data end apart; the mean update is that of one by one."""
    step: Any = {"config": {"local-steps": 1}, "model": lambda: perceptron(nn.Dropout(0.5))}
    cohort = Once(loader=lambda _, shuffle=False: data_of(0), **step)

    def updates(kind: Any) -> np.ndarray:
        grid = kind(cohort.app(), 200)
        cohort.train(grid)
        return np.stack([m.records["arrays"]["2.weight"] for m in grid.replies[0].values()])

    actual, expected = updates(Stacked), updates(stacks.OneByOne)
    assert len(np.unique(actual.reshape(200, -1), axis=0)) == 200
    spread = expected.std(0) / 200**0.5
    assert (abs(actual.mean(0) - expected.mean(0)) < 6 * spread + 1e-6).all()
    np.testing.assert_allclose(actual.std(0), expected.std(0), rtol=0.4, atol=1e-4)


def test_a_terms_noise_is_each_clients_own() -> None:
    """Else an average of many clients would have as much of it as one."""
    grid = Cohort(terms=[Odd("noise")], rounds=1).stacked()
    assert not grid.fallbacks
    updates = [m.records["arrays"]["0.bias"] for m in grid.replies[0].values()]
    assert len({a.tobytes() for a in updates}) == len(SIZES)


# settings


def test_autocast_is_near() -> None:
    """In bfloat16 a step has some 3 digits; the weights stay in float32."""
    models = []
    for how in ({}, {"precision": "bfloat16"}):
        grid = fr.StackedGrid(Cohort().app(), len(SIZES), **how)
        _, result = Cohort().train(grid, 1)
        assert not grid.fallbacks
        models.append({n: a.numpy() for n, a in result.arrays.items()})
    off = max(abs(models[1][n] - expected).max() for n, expected in models[0].items())
    assert 0 < off < 0.01


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"memory": m}, "memory must be a number of bytes") for m in (0, "1GB")),
        ({"precision": "half"}, "precision must be one of float32, bfloat16, not 'half'"),
        *(({"check": c}, "check must be 'first', a number of rounds or") for c in (0, True, "no")),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fr.StackedGrid(Cohort().app(), 2, **wrong)
