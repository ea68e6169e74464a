"""What a term of one's own is told, and may have a say in, written against `flwr_regs` alone."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_regs import (
    ClientContext,
    ClientRound,
    InProcessGrid,
    RegClient,
    RegClientApp,
    RegStrategy,
    RoundFailed,
    ServerContext,
    Term,
    client_app,
)
from flwr_regs.abilities import (
    Addresses,
    Agrees,
    Checks,
    Folds,
    Freezes,
    Personalises,
    Weighs,
)
from tests.conftest import close, make_model, to_numpy
from tests.oracles import plain_steps as oracle
from tests.oracles.model import logits
from tests.oracles.rounds import examples
from tests.oracles.server_step.fedavg import fedavg
from tests.term_runs import (
    LR,
    Arrays,
    SerialisingGrid,
    Slot,
    both_grids,
    check_models,
    make_data,
    numpy_app,
    start_weights,
    train,
)

ALL: dict[str, Any] = {"fraction_evaluate": 0.0, "seed": 3}  # all clients, no evaluation
NOTES: dict[str, list[Any]] = {}


def note(key: str, value: Any) -> None:
    """Keep what a hook saw: everything here runs in one process."""
    NOTES.setdefault(key, []).append(value)


@pytest.fixture(autouse=True)
def _no_notes() -> Iterator[None]:
    NOTES.clear()
    yield
    NOTES.clear()


def numbers(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A copy in numpy, of arrays on either side."""
    return {
        n: np.array(a.detach().numpy() if isinstance(a, torch.Tensor) else a)
        for n, a in arrays.items()
    }


def own_app(
    terms: list[type[Term]],
    data: Any,
    model: Callable[[], nn.Module] = make_model,
    make: Any = torch.optim.SGD,
    **kwargs: Any,
) -> RegClientApp:
    """An app with a loop of its own, seeded as the package's client is."""
    app = RegClientApp()

    @app.train()
    def one_round(message: Message, context: Context) -> Message:
        net = model()
        mine = data[int(context.node_config["partition-id"])]
        loop = ClientRound(message, terms, net, mine, device="cpu", **kwargs)
        with loop.seeded():
            optimizer = loop.optimizer(make)
            for inputs, targets in loop.batches():
                optimizer.zero_grad()
                output = net(inputs)
                loss = kwargs.get("loss_fn", cross_entropy)(output, targets)
                loop.loss(loss, inputs, targets, output).backward()
                loop.correct()
                optimizer.step()
            return loop.reply()

    return app


@dataclass(frozen=True)
class Addressed(Term, Addresses):
    """Sends everyone the round, and each client its own number; clients send both back."""

    name: ClassVar[str] = "addressed"

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        return {"round": np.full(3, float(ctx.round))}

    def broadcast_to(self, pid: int, server: Slot, ctx: ServerContext) -> Slot:
        return {"own": np.array([10.0 * pid + ctx.round])}

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        back = {n: 1 * a for n, a in ctx.broadcast.items()}
        return delta, back | {"id": torch.tensor(float(ctx.client_id))}, {}

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[Any, Any], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        note("uploads", {k: {n: np.copy(a) for n, a in u.items()} for k, u in uploads.items()})
        return server, delta


@both_grids
@pytest.mark.parametrize("downlink", ["model", "delta"])
def test_each_client_gets_what_is_addressed_to_it(kind: Any, downlink: str) -> None:
    strategy = RegStrategy(
        [Addressed()], downlink=downlink, seed=3, fraction_train=0.6, fraction_evaluate=0.0
    )
    train(strategy, numpy_app([Addressed], make_data()), kind=kind, rounds=4)
    for t, (uploads, entry) in enumerate(zip(NOTES["uploads"], strategy.history, strict=True), 1):
        assert sorted(uploads) == sorted(entry["cohort"])
        for k, upload in uploads.items():
            assert upload["own"].tolist() == [10 * k + t]
            assert upload["round"].tolist() == [t, t, t]
            assert upload["id"] == k


# parameters that stand still


@dataclass(frozen=True)
class Still(Term, Freezes):
    """Holds the parameters of a layer still, and notes which ones its hooks see."""

    name: ClassVar[str] = "still"
    layer: str

    def frozen(self, names: Collection[str]) -> set[str]:
        return {n for n in names if n.startswith(self.layer)}

    def start(self, params: Arrays, ctx: ClientContext) -> Arrays:
        note("names", set(params) | set(ctx.start))
        return params

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        note("names", set(params))
        return base

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        note("names", set(grads) | set(params))
        return grads

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        note("names", set(delta))
        return delta, {}, {}

    def init(self, params: Arrays) -> Slot:
        note("names", set(params))
        return {n: 0 * a for n, a in params.items()}

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[Any, Any], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        note("names", set(delta) | set(ctx.params) | set(server))
        return server, delta

    def release(self, server: Slot, step: Arrays, ctx: ServerContext) -> tuple[Slot, Arrays]:
        note("names", set(step))
        return server, step


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.1),
}


@pytest.mark.parametrize("place", ["client", "own loop"])
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("layer", ["0.", "2.bias"])
def test_a_frozen_parameter_stands_still_and_no_hook_sees_it(
    place: str, make: str, layer: str
) -> None:
    """Against a plain loop in torch that does not train it."""
    data = make_data()
    if place == "client":
        app: Any = numpy_app([Still], data, optimizer=OPTIMIZERS[make])
    else:
        app = own_app([Still], data, make=OPTIMIZERS[make])
    got = train(RegStrategy([Still(layer)], **ALL), app, kind=SerialisingGrid, rounds=2)
    start = start_weights()
    n = [sum(len(y) for _, y in batches) for batches in data]
    want = start
    for _ in range(2):
        ends = []
        for batches in data:
            model = make_model()
            model.load_state_dict({k: torch.from_numpy(a) for k, a in want.items()})
            trained = [p for k, p in model.named_parameters() if not k.startswith(layer)]
            optimizer = OPTIMIZERS[make](trained, lr=LR)
            for x, y in batches * 2:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
            ends.append(numbers(model.state_dict()))
        want = {k: sum(w * e[k] for w, e in zip(n, ends, strict=True)) / sum(n) for k in start}
    close(got[-1], want, 1e-5)
    for name in start:
        same = np.array_equal(got[-1][name], start[name])
        assert same == name.startswith(layer), name
    assert NOTES["names"]
    assert all(names == {k for k in start if not k.startswith(layer)} for names in NOTES["names"])


# uploads that cannot be used


class OfOnesOwn(Exception):
    """An exception that the package does not know."""


ERRORS = [
    *(ValueError, KeyError, MemoryError, ZeroDivisionError, AssertionError, RecursionError),
    *(struct.error, StopIteration, OfOnesOwn),
]


@dataclass(frozen=True)
class Checked(Term, Checks):
    """Uploads the client's number; the server refuses number 2."""

    name: ClassVar[str] = "checked"
    error: ClassVar[type[Exception]] = ValueError

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {"id": torch.tensor([float(ctx.client_id)])}, {}

    def init(self, params: Arrays) -> Slot:
        return {"rounds": np.zeros(1)}

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        note("params", numbers(params))
        note("server", float(server["rounds"][0]))
        if upload["id"][0] == 2:
            raise self.error("this client is refused")

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[Any, Any], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        note("used", sorted(uploads))
        return {"rounds": server["rounds"] + 1}, delta


def without(client: int, data: Any, rounds: int) -> list[Arrays]:
    """FedAvg of the other clients."""
    others = [{client}] * rounds
    return fedavg(start_weights(), to_numpy(data), rounds, lambda t: LR, 1, 4, unused=others)


@pytest.mark.parametrize("error", ERRORS)
def test_an_upload_that_is_refused_costs_its_client_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checked, "error", error)
    data = make_data()
    strategy = RegStrategy([Checked()], **ALL)
    got = train(strategy, numpy_app([Checked], data), rounds=2, **{"local-steps": 4})
    assert [list(entry["failures"]) for entry in strategy.history] == [[2], [2]]
    assert [entry["replies"] for entry in strategy.history] == [[0, 1, 3, 4]] * 2
    assert NOTES["used"] == [[0, 1, 3, 4]] * 2
    assert len(NOTES["params"]) == 10
    assert NOTES["server"] == [0.0] * 5 + [1.0] * 5
    close(NOTES["params"][0], start_weights(), 0.0)
    close(NOTES["params"][-1], got[0], 0.0)
    check_models(got, without(2, data, 2))


@dataclass(frozen=True)
class Fitting(Term, Agrees):
    """Uploads a table, which has another size on client 2; the uploads must be of one size."""

    name: ClassVar[str] = "fitting"

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {"table": torch.ones(4 if ctx.client_id == 2 else 3)}, {}

    def agree(self, uploads: Mapping[int, Slot]) -> Mapping[int, str]:
        note("pids", list(uploads))
        sizes = [u["table"].size for u in uploads.values()]
        usual = max(sizes, key=sizes.count)
        return {
            k: f"its table has {u['table'].size} rows, expected {usual}"
            for k, u in uploads.items()
            if u["table"].size != usual
        }

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[Any, Any], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        note("used", sorted(uploads))
        assert sum(ctx.weights.values()) == pytest.approx(1)
        assert sorted(ctx.weights) == sorted(ctx.replies) == sorted(uploads)
        return server, delta


def test_an_upload_that_does_not_fit_the_others_costs_its_client_alone() -> None:
    data = make_data()
    strategy = RegStrategy([Fitting()], **ALL)
    got = train(strategy, numpy_app([Fitting], data), rounds=2, **{"local-steps": 4})
    for entry in strategy.history:
        assert list(entry["failures"]) == [2]
        assert "its table has 4 rows, expected 3" in entry["failures"][2]
    assert NOTES["pids"] == [[0, 1, 2, 3, 4]] * 2
    assert NOTES["used"] == [[0, 1, 3, 4]] * 2
    check_models(got, without(2, data, 2))


# gradients elsewhere


@dataclass(frozen=True)
class Ridge(Term):
    """A part of the loss."""

    name: ClassVar[str] = "ridge"
    rate: float

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        return base + self.rate * sum((p**2).sum() for p in params.values())


@dataclass(frozen=True)
class Push(Term):
    """A correction."""

    name: ClassVar[str] = "push"
    rate: float

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return {n: g + self.rate * params[n] for n, g in grads.items()}


@dataclass(frozen=True)
class LaterPush(Push):
    """A correction on the right."""

    name: ClassVar[str] = "later-push"


@dataclass(frozen=True)
class Look(Term):
    """Looks at gradients here and elsewhere, and changes nothing."""

    name: ClassVar[str] = "look"
    look: bool

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        if not self.look:
            return grads
        here = ctx.gradient_at(params)
        moved = {n: p + 0.3 * torch.cos(3 * p) for n, p in params.items()}
        there = ctx.gradient_at(moved)
        note("here", (numbers(here), numbers(grads)))
        note("there", (numbers(moved), numbers(there), ctx.inputs.numpy(), ctx.targets.numpy()))
        note("twice", (numbers(there), numbers(ctx.gradient_at(moved))))
        return grads


def noisy() -> nn.Module:
    """A model with BatchNorm and dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3)]
        return nn.Sequential(*layers).double()


CHAIN = [Push(0.3), Look(True), LaterPush(0.7), Ridge(0.05)]
PLACES = {"client": numpy_app, "own loop": own_app}


@pytest.mark.parametrize("place", PLACES)
def test_the_gradient_elsewhere_is_that_of_the_whole_loss(place: str) -> None:
    """With the losses of all terms, and the corrections on the left."""
    kinds = [type(t) for t in CHAIN]
    train(RegStrategy(CHAIN, **ALL), PLACES[place](kinds, make_data()), rounds=1)
    for here, grads in NOTES["here"]:
        close(here, grads, 1e-12)
    assert len(NOTES["there"]) == 2 * sum(len(batches) for batches in make_data())
    for at, got, x, y in NOTES["there"]:
        g = oracle.plain(at, (x, y))
        close(got, {n: g[n] + (2 * 0.05 + 0.3) * at[n] for n in at}, 1e-10)
    for once, twice in NOTES["twice"]:
        close(once, twice, 0.0)


@pytest.mark.parametrize("place", PLACES)
def test_looking_elsewhere_changes_nothing(place: str) -> None:
    """Same dropout mask as the step's own; BatchNorm's statistics and later draws as they were."""
    data = [[b for b in client if len(b[1]) > 1] for client in make_data()]
    models = []
    for look in (True, False):
        terms = [Push(0.3), Look(look), LaterPush(0.7), Ridge(0.05)]
        app = PLACES[place]([type(t) for t in terms], data, model=noisy)
        models.append(train(RegStrategy(terms, **ALL), app, rounds=2, model=noisy))
    for here, grads in NOTES["here"]:
        close(here, grads, 1e-12)
    for once, twice in NOTES["twice"]:
        close(once, twice, 0.0)
    for seen, unseen in zip(*models, strict=True):
        close(seen, unseen, 0.0)


@dataclass(frozen=True)
class Sharp(Term):
    """Sharpness-aware, Qu et al. 2022: the gradient a little way uphill."""

    name: ClassVar[str] = "sharp"
    rho: float

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        norm = sum((g**2).sum() for g in grads.values()) ** 0.5
        return ctx.gradient_at({n: p + self.rho * grads[n] / norm for n, p in params.items()})


@both_grids
def test_a_sharpness_aware_step(kind: Any) -> None:
    data, rho = make_data(), 0.3
    got = train(RegStrategy([Sharp(rho)], **ALL), numpy_app([Sharp], data), kind=kind, rounds=3)
    w, clients = start_weights(), to_numpy(data)

    def uphill(v: Arrays, batch: Any) -> Arrays:
        g = oracle.plain(v, batch)
        norm = oracle.square(g) ** 0.5
        return oracle.plain({n: v[n] + rho * g[n] / norm for n in v}, batch)

    n = [examples(c) for c in clients]
    for _ in range(3):
        ends = [oracle.steps_of(w, c, 2 * len(c), LR, uphill) for c in clients]
        w = {k: sum(m * v[k] for m, v in zip(n, ends, strict=True)) / sum(n) for k in w}
    close(got[-1], w, 1e-5)


# what a context holds


def smoothed(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output, targets, label_smoothing=0.2)


@dataclass(frozen=True)
class Reads(Term):
    """Reads all that a client's context offers."""

    name: ClassVar[str] = "reads"
    needs: ClassVar[Collection[str]] = frozenset({"features", "start_output", "label_counts"})

    def _steps(self, hook: str, ctx: ClientContext) -> None:
        note(hook, (ctx.client_id, ctx.planned_steps, ctx.budget_steps, ctx.num_steps))
        note("always", (hook, ctx.client_id, ctx.batch_size, ctx.lr, dict(ctx.config)))

    def start(self, params: Arrays, ctx: ClientContext) -> Arrays:
        self._steps("start", ctx)
        return params

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        self._steps("loss", ctx)
        note(
            "batch",
            {
                "client": ctx.client_id,
                "params": numbers(params),
                "start": numbers(ctx.start),
                "x": ctx.inputs.numpy(),
                "y": ctx.targets.numpy(),
                "base": base.item(),
                "loss_fn": ctx.loss_fn(ctx.output, ctx.targets).item(),
                "output": ctx.output.detach().numpy(),
                "output_at": ctx.output_at(params).detach().numpy(),
                "start_output": ctx.start_output.detach().numpy(),
                "features": ctx.features.detach().numpy(),
                "features_at": ctx.features_at(params).detach().numpy(),
                "features_at_start": ctx.features_at(ctx.start).detach().numpy(),
                "label_counts": np.asarray(ctx.label_counts.tolist()),
            },
        )
        return base

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        self._steps("correct", ctx)
        return grads

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        self._steps("finish", ctx)
        end = {n: ctx.start[n] + d for n, d in delta.items()}
        note(
            "data",
            {
                "client": ctx.client_id,
                "end": numbers(end),
                "loss": float(ctx.mean_loss(end)),
                "gradient": numbers(ctx.mean_gradient(end)),
                "features": numbers({"": ctx.mean_features(end)})[""],
                "first": numbers({"": ctx.mean_features(end, batches=1)})[""],
            },
        )
        return delta, {}, {}


def budget(k: int, _turn: int) -> int | None:
    return 3 if k == 2 else None


@pytest.mark.parametrize("place", PLACES)
def test_what_a_term_reads_on_a_client(place: str) -> None:
    data = make_data()
    extra = {"budget": budget} if place == "client" else {"max_steps": 3}
    app = PLACES[place]([Reads], data, **extra)
    train(RegStrategy([Reads()], **ALL), app, rounds=1)
    clients = to_numpy(data)
    counts = [np.bincount(np.concatenate([y for _, y in c]), minlength=3) for c in clients]
    assert NOTES["batch"]
    for seen in NOTES["batch"]:
        w, x, y = seen["params"], seen["x"], seen["y"]
        near = partial(np.testing.assert_allclose, rtol=0, atol=1e-10)
        near(seen["base"], oracle.loss(w, x, y))
        near(seen["loss_fn"], oracle.loss(w, x, y))
        near(seen["output"], logits(w, x))
        near(seen["output_at"], logits(w, x))
        near(seen["start_output"], logits(seen["start"], x))
        near(seen["features"], oracle.features(w, x))
        near(seen["features_at"], oracle.features(w, x))
        near(seen["features_at_start"], oracle.features(seen["start"], x))
        near(seen["label_counts"], counts[seen["client"]])
        close(seen["start"], start_weights(), 0.0)
    assert sorted(seen["client"] for seen in NOTES["data"]) == [0, 1, 2, 3, 4]
    for seen in NOTES["data"]:
        w, mine = seen["end"], clients[seen["client"]]
        near(seen["loss"], oracle.mean_loss(w, mine))
        close(seen["gradient"], oracle.mean_gradient(w, mine), 1e-10)
        near(seen["features"], oracle.mean_features(w, mine))
        near(seen["first"], oracle.mean_features(w, mine[:1]))
    for hook in ("start", "loss", "correct", "finish"):
        for k, planned, most, steps in NOTES[hook]:
            want = 2 * len(data[k])
            cut = 3 if (place == "own loop" or k == 2) else want
            assert (planned, most, steps) == (want, min(cut, want), min(cut, want)), hook
    for hook, k, batch_size, lr, seen in NOTES["always"]:
        size = 0 if hook == "start" else len(data[k][0][1])
        assert (batch_size, lr) == (size, LR)
        assert seen["lr"] == LR
        assert seen["local-epochs"] == 2


@pytest.mark.parametrize("place", PLACES)
def test_the_loss_is_the_clients_own(place: str) -> None:
    app = PLACES[place]([Reads], make_data(), loss_fn=smoothed)
    train(RegStrategy([Reads()], **ALL), app, rounds=1)
    for seen in NOTES["batch"]:
        x, y = torch.from_numpy(seen["output"]), torch.from_numpy(seen["y"])
        assert seen["loss_fn"] == seen["base"] == pytest.approx(smoothed(x, y).item(), abs=1e-12)


@pytest.mark.parametrize("place", PLACES)
def test_functions_over_the_data_are_in_eval_mode_and_leave_no_trace(place: str) -> None:
    """With BatchNorm and dropout: the model is what it is without them, to the bit."""
    data = [[b for b in client if len(b[1]) > 1] for client in make_data()]
    models = []
    for terms in ([Reads], [Ridge]):
        chain = [t(0.0) if t is Ridge else t() for t in terms]
        app = PLACES[place](terms, data, model=noisy)
        models.append(train(RegStrategy(chain, **ALL), app, rounds=2, model=noisy))
    for read, unread in zip(*models, strict=True):
        close(read, unread, 0.0)


# a second model


@dataclass(frozen=True)
class Second(Term):
    """Trains a second model for more steps than the round's own, and a number of its own."""

    name: ClassVar[str] = "second"

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        def loss(v: Arrays, at: ClientContext) -> Any:
            note("targets", at.targets.tolist())
            return at.loss_fn(at.output_at(v), at.targets)

        def parabola(v: Arrays, at: ClientContext) -> Any:
            return 0.5 * (v["a"] - 3) ** 2

        before = numbers(ctx.start)
        end = ctx.train(ctx.start, loss, ctx.num_steps + 3)
        close(numbers(ctx.start), before, 0.0)  # what was given is not changed
        note("second", (ctx.client_id, numbers(end)))
        zero = torch.zeros((), dtype=torch.float64)
        number = ctx.train({"a": zero}, parabola, 5)["a"]
        note("a", float(number))
        assert zero == 0
        note("none", numbers(ctx.train(ctx.start, loss, 0)))
        return delta, {}, {}


@pytest.mark.parametrize("place", PLACES)
def test_more_steps_of_a_second_model_go_on_through_the_data(place: str) -> None:
    data = make_data()
    app = PLACES[place]([Second], data)
    train(RegStrategy([Second()], **ALL), app, rounds=1, **{"local-steps": 4})
    w = start_weights()
    assert len(NOTES["second"]) == 5
    for k, end in NOTES["second"]:
        close(end, oracle.steps_of(w, to_numpy(data)[k], 7, LR, oracle.plain), 1e-10)
    assert NOTES["a"] == pytest.approx([3 - 3 * (1 - LR) ** 5] * 5)
    for none in NOTES["none"]:
        close(none, w, 0.0)


# what the server is told


@dataclass(frozen=True)
class Server(Term, Weighs):
    """Notes the server's contexts."""

    name: ClassVar[str] = "server-notes"

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        note("before", (dict(ctx.weights), dict(ctx.replies), ctx.population))
        return {}

    def weigh(
        self, weights: Mapping[int, float], uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> Mapping[int, float]:
        note("weights", (dict(weights), dict(ctx.weights), sorted(uploads)))
        return {k: 0.5 * p for k, p in weights.items()}

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[Any, Any], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        note("ctx", ctx)
        note("params", numbers(ctx.params))
        note("previous", None if ctx.previous_step is None else numbers(ctx.previous_step))
        return server, delta


def test_what_a_term_reads_on_the_server() -> None:
    data = make_data()
    strategy = RegStrategy(
        [Server()],
        seed=3,
        fraction_train=0.6,
        fraction_evaluate=0.0,
        lr_schedule=lambda t: 1 / t,
    )
    got = train(strategy, numpy_app([Server], data, budget=budget), rounds=4)
    models = [start_weights(), *got]
    n = [examples(c) for c in to_numpy(data)]
    clients = to_numpy(data)
    for t, ctx in enumerate(NOTES["ctx"], 1):
        cohort = sorted(strategy.history[t - 1]["cohort"])
        total = sum(n[k] for k in cohort)
        p = {k: pytest.approx(n[k] / total) for k in cohort}
        assert ctx.weights == p
        assert NOTES["weights"][t - 1] == (p, p, cohort)
        assert NOTES["before"][t - 1] == ({}, {}, 5)
        assert (ctx.round, ctx.lr, ctx.population) == (t, pytest.approx(LR / t), 5)
        close(NOTES["params"][t - 1], models[t - 1], 0.0)
        if t == 1:
            assert NOTES["previous"][0] is None
            assert ctx.previous_lr is None
        else:
            step = {k: models[t - 1][k] - models[t - 2][k] for k in models[0]}
            close(NOTES["previous"][t - 1], step, 1e-12)
            assert ctx.previous_lr == pytest.approx(LR / (t - 1))
        assert list(ctx.replies) == cohort
        want = {name: np.zeros_like(a) for name, a in models[0].items()}
        for k, reply in ctx.replies.items():
            planned = 2 * len(data[k])
            steps = 3 if k == 2 else planned
            assert (reply.num_examples, reply.num_steps) == (n[k], steps)
            assert reply.planned_steps == planned
            delta = oracle.moved(models[t - 1], clients[k], steps, LR / t)
            assert reply.norm == pytest.approx(oracle.square(delta) ** 0.5, abs=1e-9)
            assert np.isfinite(reply.loss)
            want = {m: want[m] + 0.5 * n[k] / total * delta[m] for m in want}
        close(models[t], {m: models[t - 1][m] + want[m] for m in want}, 1e-5)


# the evaluation sees what a client has


@dataclass(frozen=True)
class Own(Term, Personalises):
    """Ditto, Li et al. 2021: beside the global model, a model of the client's own, pulled towards it."""

    name: ClassVar[str] = "own"
    keeps: ClassVar[str] = "always"
    lam: float

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        def loss(u: Arrays, at: ClientContext) -> Any:
            pull = sum(((u[n] - ctx.start[n]) ** 2).sum() for n in u)
            return ctx.loss_fn(at.output_at(u), at.targets) + self.lam / 2 * pull

        return delta, {}, ctx.train(ctx.client or ctx.start, loss, ctx.num_steps)

    def personal(self, params: Arrays, ctx: ClientContext) -> Arrays:
        return dict(ctx.client) if ctx.client else params


def test_a_personal_model_of_a_client_without_state_is_the_global_one() -> None:
    """`personal` on a client that never trained; evaluation of the clients that took part differs."""
    data = make_data()

    def client_fn(context: Context) -> Any:
        mine = data[int(context.node_config["partition-id"])]
        return RegClient(make_model(), mine, mine, device="cpu", terms=[Own])

    strategy = RegStrategy([Own(0.1)], seed=3, fraction_train=0.4, min_train_nodes=1)
    strategy.start(
        grid=InProcessGrid(client_app(client_fn), 5),
        initial_arrays=ArrayRecord(make_model().state_dict()),
        num_rounds=1,
        train_config=ConfigRecord({"lr": LR, "local-epochs": 2}),
    )
    (entry,) = strategy.history
    assert len(entry["cohort"]) == 2
    for k, metrics in entry["evaluate"]["clients"].items():
        same = metrics["personal-loss"] == pytest.approx(metrics["loss"], abs=1e-12)
        assert same == (k not in entry["cohort"])


@dataclass(frozen=True)
class Tuned(Term, Personalises):
    """Fine-tunes the global model where it is evaluated."""

    name: ClassVar[str] = "tuned"

    def personal(self, params: Arrays, ctx: ClientContext) -> Arrays:
        def loss(v: Arrays, at: ClientContext) -> Any:
            return at.loss_fn(at.output_at(v), at.targets)

        return ctx.train(params, loss, 5)


def test_a_personal_model_may_be_trained_where_it_is_evaluated() -> None:
    """On the training data, which is the test data here."""
    strategy = RegStrategy([Tuned()], seed=3)
    train(strategy, numpy_app([Tuned], make_data()), rounds=1)
    for metrics in strategy.history[0]["evaluate"]["clients"].values():
        assert metrics["personal-loss"] < metrics["loss"] - 1e-3


def test_a_users_own_config_key_reaches_the_terms() -> None:
    app = numpy_app([Reads], make_data())
    train(RegStrategy([Reads()], **ALL), app, rounds=1, **{"local-epochs": 1, "user.key": 7})
    assert all(config["user.key"] == 7 for *_, config in NOTES["always"])


@dataclass(frozen=True)
class TooEarly(Term):
    """Asks for the gradient of the loss in the loss."""

    name: ClassVar[str] = "too-early"

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        return base + ctx.gradient_at(params)["2.bias"].sum()


def test_a_function_that_is_not_there_says_so() -> None:
    with pytest.raises(RoundFailed, match=r"gradient_at is there in `correct`"):
        train(RegStrategy([TooEarly()], **ALL), numpy_app([TooEarly], make_data()), rounds=1)


@dataclass(frozen=True)
class Hoard(Term, Folds):
    """Folds large uploads, and looks which of the others' are still held."""

    name: ClassVar[str] = "hoard"
    first: ClassVar[list[Slot]] = []
    held: ClassVar[list[list[int]]] = []
    seen: ClassVar[dict[int, Any]] = {}

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {"big": torch.full((5000,), 1.0 + ctx.client_id)}, {}

    def fold(
        self, acc: Slot, pid: int, delta: Arrays, upload: Slot, weight: float, ctx: ServerContext
    ) -> Slot:
        if not self.seen:
            self.first.append(dict(acc))
        self.held.append([k for k, ref in self.seen.items() if ref() is not None])
        self.seen[pid] = weakref.ref(upload["big"])
        assert weight == ctx.weights[pid]
        norm = sum((d**2).sum() for d in delta.values()) ** 0.5
        assert norm == pytest.approx(ctx.replies[pid].norm)
        acc[str(pid)] = upload["big"][0] * 1
        return acc

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[Any, Any], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        assert uploads == {str(k): 1.0 + k for k in sorted(ctx.replies)}
        assert list(ctx.replies) == sorted(ctx.replies)
        self.seen.clear()
        return server, delta


class Backwards(SerialisingGrid):
    """Returns replies last first."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return list(super().pull_messages(message_ids))[::-1]


@pytest.mark.parametrize("kind", [InProcessGrid, Backwards])
def test_uploads_are_folded_one_at_a_time(kind: Any) -> None:
    for record in (Hoard.first, Hoard.held, Hoard.seen):
        record.clear()
    strategy = RegStrategy([Hoard()], seed=3, fraction_evaluate=0.0)
    train(strategy, numpy_app([Hoard], make_data()), kind=kind, rounds=2)
    assert not any(entry["failures"] for entry in strategy.history)
    assert Hoard.first == [{}, {}]
    assert len(Hoard.held) == 10
    assert Hoard.held == [[]] * 10
