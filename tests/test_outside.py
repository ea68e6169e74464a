"""Methods that the package does not know, written against `flwr_regs` alone; plain loops are the proof.

FedNova's weights, q-FedAvg's, a control variate, 8 bits a parameter, a personal model: each term stands
here as a user would write it, and oracles/outside.py has the loop of its paper. Clients are unequal in
data, batches and steps; some fall out.
"""

from __future__ import annotations

import struct
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_regs import (
    CentralDP,
    ClientContext,
    ClientRound,
    InProcessGrid,
    RegClient,
    RegClientApp,
    RegStrategy,
    ServerContext,
    Term,
    client_app,
)
from flwr_regs.abilities import Compresses, Folds, Personalises, TakesBack, Weighs
from tests.conftest import Batch, close, make_model, to_numpy
from tests.oracles import outside as oracle
from tests.oracles.outside import Told, Turn

Arrays = dict[str, Any]
Slot = dict[str, Any]
Models = list[dict[str, np.ndarray]]
Fate = Callable[[int, int], str]  # (client, how many turns it had) -> "used", "unused" or "lost"
Budget = Callable[[int, int], int | None]  # (client, how many turns it had) -> its step budget

LR = 0.2
SIZES = [[5], [4, 3], [5, 2, 4], [3, 3, 3, 1], [6, 5]]
SOME = {"fraction_train": 0.6, "min_train_nodes": 1, "fraction_evaluate": 0.0}  # 3 of 5 clients


def make_data() -> list[list[Batch]]:
    """Five clients with unequal numbers of batches of unequal size, and skewed labels."""
    clients = []
    for k, sizes in enumerate(SIZES):
        g = torch.Generator().manual_seed(200 + k)
        clients.append(
            [
                (
                    torch.randn(b, 4, generator=g, dtype=torch.float64) + 0.3 * k,
                    torch.randint(0, 2, (b,), generator=g) + k % 2,
                )
                for b in sizes
            ]
        )
    return clients


class SerialisingGrid(InProcessGrid):
    """Sends messages and client state through Flower's own serialisation, as a real node does."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for m in messages:
            m.content = recorddict_from_proto(recorddict_to_proto(m.content))
        ids = super().push_messages(messages)
        for i in ids:
            if not (reply := self._replies[i]).has_error():
                reply.content = recorddict_from_proto(recorddict_to_proto(reply.content))
        for context in self._contexts.values():
            context.state = recorddict_from_proto(recorddict_to_proto(context.state))
        return ids


both_grids = pytest.mark.parametrize("kind", [InProcessGrid, SerialisingGrid])


def always(_k: int, _turn: int) -> str:
    return "used"


def now_and_then(k: int, turn: int) -> str:
    """Client 1 falls out in its second turn, client 2 sends NaN in its first, client 4 in its third."""
    if (k, turn) == (1, 1):
        return "lost"
    return "unused" if (k, turn) in {(2, 0), (4, 2)} else "used"


def no_budget(_k: int, _turn: int) -> None:
    return None


def short_of_time(k: int, turn: int) -> int | None:
    """Client 0 always takes one step, client 3 five steps in every other turn."""
    return 1 if k == 0 else 5 if k == 3 and turn % 2 == 0 else None


def at_times(k: int, turn: int) -> int | None:
    """Client 0 has a budget in every other turn, client 3 in every third."""
    return {(0, 1): 1, (3, 2): 5}.get((k, turn % (2 if k == 0 else 3)))


def put_nan(result: Any) -> Any:
    """The reply of `fit` with NaN in the model."""
    arrays, n, metrics = result
    spoilt = [a.copy() for a in arrays]
    spoilt[0].flat[0] = np.nan
    return spoilt, n, metrics


class Scripted(RegClient):
    """A client that trains, and then does what `act` says to its reply."""

    act: Callable[[Any], Any]

    def fit(self, parameters: Any, config: Any) -> Any:
        return self.act(super().fit(parameters, config))


def numpy_app(
    terms: Sequence[type[Term]],
    data: Sequence[Any],
    model: Callable[[], nn.Module] = make_model,
    budget: Budget = no_budget,
    fate: Fate = always,
    spoil: Callable[[Any], Any] = put_nan,
    **kwargs: Any,
) -> Any:
    """An app of NumPyClients."""
    turns: Counter[int] = Counter()

    def client_fn(context: Context) -> Any:
        k = int(context.node_config["partition-id"])

        def act(result: Any) -> Any:
            turns[k] += 1
            what = fate(k, turns[k] - 1)
            if what == "lost":
                raise RuntimeError("the power failed")
            return spoil(result) if what == "unused" else result

        client = Scripted(
            model(),
            data[k],
            data[k],
            device="cpu",
            terms=terms,
            step_budget=budget(k, turns[k]),
            **kwargs,
        )
        client.act = act
        return client

    return client_app(client_fn)


def own_app(
    terms: Sequence[type[Term]],
    data: Sequence[Any],
    budget: Budget = no_budget,
    fate: Fate = always,
) -> RegClientApp:
    """An app whose loop is its own."""
    app = RegClientApp()
    turns: Counter[int] = Counter()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        k = int(context.node_config["partition-id"])
        model = make_model()
        loop = ClientRound(
            message, terms, model, data[k], device="cpu", max_steps=budget(k, turns[k])
        )
        optimizer = loop.optimizer(torch.optim.SGD)
        for inputs, targets in loop.batches():
            optimizer.zero_grad()
            output = model(inputs)
            loop.loss(cross_entropy(output, targets), inputs, targets, output).backward()
            loop.correct()
            optimizer.step()
        turns[k] += 1
        what = fate(k, turns[k] - 1)
        if what == "unused":
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
        reply = loop.reply()
        if what == "lost":
            raise RuntimeError("the power failed")
        return reply

    return app


def train(
    strategy: RegStrategy,
    app: Any,
    *,
    kind: type[InProcessGrid] = InProcessGrid,
    rounds: int = 8,
    clients: int = 5,
    model: Callable[[], nn.Module] = make_model,
    **config: Any,
) -> Models:
    """Return the global model after each round."""
    models: Models = []
    strategy.start(
        grid=kind(app, clients),
        initial_arrays=ArrayRecord(model().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": LR, **(config or {"local-epochs": 2})}),
        evaluate_fn=lambda t, arrays: models.append(
            {n: a.numpy().copy() for n, a in arrays.items()}
        ),
    )
    return models[1:]


def start_weights() -> dict[str, np.ndarray]:
    return {n: a.numpy().copy() for n, a in make_model().state_dict().items()}


def turns_of(
    strategy: RegStrategy,
    data: Sequence[Any],
    budget: Budget = no_budget,
    fate: Fate = always,
    epochs: int = 2,
) -> list[list[Turn]]:
    """What the oracle trains, given the cohorts; the history must agree on whose reply was used."""
    count: Counter[int] = Counter()
    rounds = []
    for entry in strategy.history:
        turns = []
        for k in sorted(entry["cohort"]):
            planned = epochs * len(data[k])
            steps = min(planned, budget(k, count[k]) or planned)
            what = fate(k, count[k])
            if what == "used" and steps < planned and strategy.incomplete == "drop":
                what = "unused"
            count[k] += 1
            turns.append(Turn(k, steps, what))
        rounds.append(turns)
        assert sorted(entry["replies"]) == [t.k for t in turns if t.fate == "used"]
    return rounds


def check_models(got: Models, want: Told, tol: float = 1e-5) -> None:
    assert len(got) == len(want.models)
    for mine, theirs in zip(got, want.models, strict=True):
        close(mine, theirs, tol)


def distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    return max(float(np.abs(a[n] - b[n]).max()) for n in a)


# FedNova's weights


@dataclass(frozen=True)
class Nova(Term, Weighs):
    """Wang et al. 2020 for plain SGD: a client's steps are its a_k. Only the server runs it."""

    name: ClassVar[str] = "nova"

    def weigh(
        self, weights: Mapping[int, float], uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> Mapping[int, float]:
        a = {k: ctx.replies[k].num_steps for k in weights}
        effective = sum(weights[k] * a[k] for k in weights)
        return {k: weights[k] * effective / a[k] for k in weights}


@both_grids
@pytest.mark.parametrize("weighting", ["num-examples", "uniform"])
@pytest.mark.parametrize("known", [[Nova], []], ids=["client knows it", "client does not"])
def test_novas_weights(kind: Any, weighting: str, known: list[type[Term]]) -> None:
    data = make_data()
    strategy = RegStrategy([Nova()], seed=3, weighting=weighting, **SOME)
    app = numpy_app(known, data, budget=short_of_time, fate=now_and_then)
    got = train(strategy, app, kind=kind)
    rounds = turns_of(strategy, data, short_of_time, now_and_then)
    assert {t.fate for turns in rounds for t in turns} == {"used", "unused", "lost"}
    w, clients = start_weights(), to_numpy(data)
    check_models(got, oracle.nova(w, clients, rounds, LR, weighting))
    other = "uniform" if weighting == "num-examples" else "num-examples"
    assert distance(got[-1], oracle.nova(w, clients, rounds, LR, other).models[-1]) > 1e-3


def test_novas_weights_in_a_loop_of_ones_own() -> None:
    data = make_data()
    strategy = RegStrategy([Nova()], seed=3, fraction_evaluate=0.0)
    got = train(strategy, own_app([], data), rounds=3)
    check_models(
        got,
        oracle.nova(start_weights(), to_numpy(data), turns_of(strategy, data), LR, "num-examples"),
    )


# q-FedAvg's weights


@dataclass(frozen=True)
class Fair(Term, Weighs):
    """q-FedAvg, Li et al. 2020: a client with a large loss at w_t counts for more."""

    name: ClassVar[str] = "fair"
    q: float

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {"loss": ctx.mean_loss(ctx.start)}, {}

    def weigh(
        self, weights: Mapping[int, float], uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> Mapping[int, float]:
        big, q = 1 / ctx.lr, self.q
        losses = {k: float(uploads[k]["loss"]) for k in weights}
        below = sum(
            q * f ** (q - 1) * (big * ctx.replies[k].norm) ** 2 + big * f**q
            for k, f in losses.items()
        )
        return {k: big * f**q / below for k, f in losses.items()}


@both_grids
@pytest.mark.parametrize("q", [0.0, 1.5])
def test_a_fair_clients_weight(kind: Any, q: float) -> None:
    data = make_data()
    strategy = RegStrategy([Fair(q)], seed=5, **SOME)
    app = numpy_app([Fair], data, budget=short_of_time, fate=now_and_then)
    got = train(strategy, app, kind=kind)
    rounds = turns_of(strategy, data, short_of_time, now_and_then)
    check_models(got, oracle.fair(start_weights(), to_numpy(data), rounds, LR, q))


def with_batch_norm(data: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
    """The batches that BatchNorm can train on."""
    return [[b for b in client if len(b[1]) > 1] for client in data]


batch_norm = partial(make_model, batch_norm=True)


def test_buffers_keep_the_plain_weights_where_a_term_weighs() -> None:
    """Against a plain loop in torch, as this model has BatchNorm."""
    data = with_batch_norm(make_data())
    strategy = RegStrategy([Nova()], seed=5, fraction_evaluate=0.0)
    app = numpy_app([Nova], data, model=batch_norm, budget=short_of_time)
    (got,) = train(strategy, app, rounds=1, model=batch_norm)
    start = {n: v.clone() for n, v in batch_norm().state_dict().items()}
    names = [n for n, _ in batch_norm().named_parameters()]
    ends = {}
    for k, batches in enumerate(data):
        net = batch_norm()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        for x, y in (batches * 2)[: short_of_time(k, 0)]:
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
        ends[k] = net.state_dict()
    n = {k: sum(len(y) for _, y in batches) for k, batches in enumerate(data)}
    p = {k: n[k] / sum(n.values()) for k in n}
    omega = oracle.nova_weights(p, {k: short_of_time(k, 0) or 2 * len(data[k]) for k in p})
    assert max(abs(omega[k] - p[k]) for k in p) > 0.1
    for name, before in start.items():
        if before.is_floating_point():
            weights = omega if name in names else p
            want = before + sum(weights[k] * (ends[k][name] - before) for k in ends)
            np.testing.assert_allclose(got[name], want, rtol=0, atol=1e-5, err_msg=name)
        else:
            assert got[name].dtype == np.int64


@dataclass(frozen=True)
class FirstLoss(Term):
    """Uploads F_k(w_t)."""

    name: ClassVar[str] = "first-loss"
    found: ClassVar[dict[int, float]] = {}

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {"loss": ctx.mean_loss(ctx.start)}, {}

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[Any, Any], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        self.found.update({k: float(u["loss"]) for k, u in uploads.items()})
        return server, delta


def test_the_loss_at_the_global_model_is_that_of_its_own_buffers() -> None:
    """F_k(w_t) says how well the global model does, not w_t with the client's BatchNorm statistics."""
    data = with_batch_norm(make_data())
    strategy = RegStrategy([FirstLoss()], seed=5, fraction_evaluate=0.0)
    train(strategy, numpy_app([FirstLoss], data, model=batch_norm), rounds=1, model=batch_norm)
    net = batch_norm().eval()
    for k, batches in enumerate(data):
        total = sum(len(y) * cross_entropy(net(x), y).item() for x, y in batches)
        want = total / sum(len(y) for _, y in batches)
        assert FirstLoss.found[k] == pytest.approx(want, abs=1e-9)


# a control variate


@dataclass(frozen=True)
class Control(Term, Folds):
    """SCAFFOLD, Karimireddy et al. 2020, with option 2.

    A client also uploads the control variate that it used; `folded` and `servers` keep what came.
    """

    name: ClassVar[str] = "control"
    folded: ClassVar[list[tuple[int, int, dict[str, np.ndarray]]]] = []
    servers: ClassVar[list[dict[str, np.ndarray]]] = []

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        c, own = ctx.broadcast, ctx.client
        return {n: g + c[n] - own.get(n, 0 * g) for n, g in grads.items()}

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        own = {n: 1 * ctx.client.get(n, 0 * d) for n, d in delta.items()}
        new = {
            n: own[n] - ctx.broadcast[n] - d / (ctx.num_steps * ctx.lr) for n, d in delta.items()
        }
        rise = {f"rise {n}": new[n] - own[n] for n in delta}
        return delta, rise | {f"used {n}": a for n, a in own.items()}, new

    def init(self, params: Arrays) -> Slot:
        return {n: 0 * w for n, w in params.items()}

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        return {n: 1 * c for n, c in server.items()}

    def fold(
        self, acc: Slot, pid: int, delta: Arrays, upload: Slot, weight: float, ctx: ServerContext
    ) -> Slot:
        self.folded.append((ctx.round, pid, {n: upload[f"used {n}"].copy() for n in delta}))
        return {n: acc.get(n, 0.0) + upload[f"rise {n}"] for n in delta}

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[Any, Any], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        new = {n: c + uploads[n] / ctx.population for n, c in server.items()}
        self.servers.append({n: c.copy() for n, c in new.items()})
        return new, delta


@pytest.fixture
def recorded() -> Iterator[type[Control]]:
    Control.folded.clear()
    Control.servers.clear()
    yield Control
    Control.folded.clear()
    Control.servers.clear()


def check_control(got: Models, data: Any, rounds: list[list[Turn]], weighting: str) -> None:
    want = oracle.scaffold(start_weights(), to_numpy(data), rounds, LR, weighting)
    check_models(got, want)
    assert [(t, k) for t, k, _ in Control.folded] == [
        (t, turn.k) for t, turns in enumerate(rounds, 1) for turn in turns if turn.fate == "used"
    ]  # each reply that is used, once, in the order of ids
    for t, k, c_k in Control.folded:
        close(c_k, want.c_used[t, k], 1e-5)
    for mine, theirs in zip(Control.servers, want.c, strict=True):
        close(mine, theirs, 1e-5)


def mean_of_controls(rounds: int) -> list[tuple[int, dict[str, np.ndarray]]]:
    """(t, Σ_k c_k / N after round t), where every client shows in a later round what it has."""
    out = []
    for t in range(1, rounds):
        then = [next((c for r, j, c in Control.folded if j == k and r > t), None) for k in range(5)]
        there = [c for c in then if c is not None]
        if len(there) == 5:
            out.append((t, {n: sum(c[n] for c in there) / 5 for n in there[0]}))
    return out


PLACES = {
    "one process": (InProcessGrid, partial(numpy_app, [Control])),
    "serialised": (SerialisingGrid, partial(numpy_app, [Control])),
    "own loop": (SerialisingGrid, partial(own_app, [Control])),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("incomplete", ["average", "drop"])
@pytest.mark.parametrize("weighting", ["num-examples", "uniform"])
def test_a_control_variate(
    recorded: type[Control], place: str, incomplete: str, weighting: str
) -> None:
    """3 of 5 clients a round; some have a step budget, some fall out. Σ c_k / N stays c."""
    kind, app_of = PLACES[place]
    data = make_data()
    budget = short_of_time if incomplete == "average" else at_times
    strategy = RegStrategy([Control()], seed=8, weighting=weighting, incomplete=incomplete, **SOME)
    app = app_of(data, budget=budget, fate=now_and_then)
    got = train(strategy, app, kind=kind, rounds=12)
    rounds = turns_of(strategy, data, budget, now_and_then)
    check_control(got, data, rounds, weighting)
    means = mean_of_controls(12)
    assert len(means) > 4
    for t, mean in means:
        close(mean, Control.servers[t - 1], 1e-12)


def test_a_control_variate_needs_its_client_state(recorded: type[Control]) -> None:
    """The check above can fail: a client that forgets has another Σ c_k."""
    data = make_data()
    strategy = RegStrategy([Control()], seed=8, **SOME)
    app = numpy_app([Control], data)

    class Forgetting(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            for context in self._contexts.values():
                context.state = type(context.state)()
            return super().push_messages(messages)

    train(strategy, app, kind=Forgetting, rounds=12)
    means = mean_of_controls(12)
    assert max(distance(mean, Control.servers[t - 1]) for t, mean in means) > 1e-3


class Slow(list[Batch]):
    """Batches that take their time after the second."""

    def __iter__(self) -> Iterator[Batch]:
        for i, batch in enumerate(super().__iter__()):
            if i == 2:
                time.sleep(0.2)
            yield batch


@pytest.mark.parametrize("place", ["one process", "own loop"])
def test_steps_that_a_time_budget_cut_off(recorded: type[Control], place: str) -> None:
    """`num_steps` is what was taken: the oracle takes it from the history."""
    data = make_data()[2:]
    data[1] = Slow(data[1])
    if place == "own loop":
        app: Any = RegClientApp()

        @app.train()
        def loop(message: Message, context: Context) -> Message:
            k = int(context.node_config["partition-id"])
            model = make_model()
            limit = 0.15 if k == 1 else None
            loop = ClientRound(message, [Control], model, data[k], device="cpu", max_seconds=limit)
            optimizer = loop.optimizer(torch.optim.SGD)
            for inputs, targets in loop.batches():
                optimizer.zero_grad()
                output = model(inputs)
                loop.loss(cross_entropy(output, targets), inputs, targets, output).backward()
                loop.correct()
                optimizer.step()
            return loop.reply()
    else:

        def client_fn(context: Context) -> Any:
            k = int(context.node_config["partition-id"])
            limit = 0.15 if k == 1 else None
            return RegClient(
                make_model(), data[k], device="cpu", terms=[Control], time_budget=limit
            )

        app = client_app(client_fn)
    strategy = RegStrategy([Control()], seed=8, fraction_evaluate=0.0)
    got = train(strategy, app, clients=3, rounds=2)
    steps = [entry["steps"] for entry in strategy.history]
    assert all(s[0] == 6 and 1 <= s[1] < 8 and s[2] == 4 for s in steps)
    rounds = [[Turn(k, s[k], "used") for k in range(3)] for s in steps]
    check_control(got, data, rounds, "num-examples")


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


# 8 bits a parameter


KINDS = {
    1: KeyError,
    2: MemoryError,
    3: struct.error,
    4: RecursionError,
    5: AssertionError,
    6: StopIteration,
    7: ZeroDivisionError,
    8: UnicodeDecodeError,
    9: Exception,
}
NONSENSE: dict[int, Callable[[dict[str, np.ndarray]], Any]] = {
    20: lambda out: {n: a[None] for n, a in out.items()},
    21: lambda out: {n: a.reshape(-1)[0] for n, a in out.items()},
    22: lambda out: dict(list(out.items())[1:]),
    23: lambda out: out | {"another": np.zeros(3)},
    24: lambda out: dict.fromkeys(out, "text"),
    25: lambda out: None,
    26: lambda out: {n: a.astype(np.complex128) for n, a in out.items()},
    27: lambda out: {n: a.astype(object) for n, a in out.items()},
    28: lambda out: list(out.values()),
    29: lambda out: {n: a.astype(np.int64) for n, a in out.items()},
    30: lambda out: {n: a * np.nan for n, a in out.items()},
    31: lambda out: {n: a + np.inf for n, a in out.items()},
    32: lambda out: {n: a + 1e200 for n, a in out.items()},
    33: lambda out: {n.upper(): a for n, a in out.items()},
    34: lambda out: 7,
    35: lambda out: {},
}


def eight_bits(x: Any) -> Any:
    scale = abs(x).max() / 127
    scale = scale + (scale == 0)
    return (x / scale).round() * scale


@dataclass(frozen=True)
class EightBits(Term, Compresses, TakesBack):
    """Each parameter as one byte, and what is left over with the next update.

    The first byte of a code is 0. `decode` does not take care: other first bytes make it raise, or
    return nonsense.
    """

    name: ClassVar[str] = "eight-bits"

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        whole = {n: d + ctx.client.get(n, 0 * d) for n, d in delta.items()}
        sent = {n: eight_bits(d) for n, d in whole.items()}
        return sent, {}, {n: whole[n] - sent[n] for n in sent}

    def encode(self, update: Mapping[str, Any]) -> bytes:
        out = [b"\0"]
        for a in update.values():
            scale = float(abs(a).max() / 127) or 1.0
            out.append(struct.pack("<d", scale) + np.rint(a / scale).astype(np.int8).tobytes())
        return b"".join(out)

    def decode(self, data: bytes, like: Mapping[str, Any]) -> Mapping[str, Any]:
        tag, at, out = data[0], 1, {}
        if tag == 8:
            bytes([255]).decode()
        if tag in KINDS:
            raise KINDS[tag]("a hostile code")
        for n, a in like.items():
            (scale,) = struct.unpack_from("<d", data, at)
            values = np.frombuffer(data, np.int8, a.size, at + 8)
            out[n] = (values * scale).reshape(a.shape).astype(a.dtype)
            at += 8 + a.size
        if at != len(data):
            raise ValueError(f"a code of {len(data)} bytes, expected {at}")
        return NONSENSE[tag](out) if tag else out

    def unused(self, before: Slot, after: Slot, sent: Arrays) -> Slot:
        return {n: after[n] + sent[n] for n in after}


@dataclass(frozen=True)
class EightBitsBothWays(EightBits):
    """The global step is coded too; the server moves by what it sends."""

    name: ClassVar[str] = "eight-bits-both-ways"

    def release(self, server: Slot, step: Arrays, ctx: ServerContext) -> tuple[Slot, Arrays]:
        whole = {n: s + server.get(n, 0.0) for n, s in step.items()}
        sent = {n: eight_bits(s) for n, s in whole.items()}
        return {n: whole[n] - sent[n] for n in sent}, sent


def put_code(change: Callable[[bytes], Any]) -> Callable[[Any], Any]:
    """Change the code in the reply of `fit`; None takes it out."""

    def act(result: Any) -> Any:
        arrays, n, metrics = result
        code = change(metrics["regs.update"])
        metrics = {k: v for k, v in metrics.items() if k != "regs.update"}
        return arrays, n, metrics if code is None else metrics | {"regs.update": code}

    return act


@both_grids
@pytest.mark.parametrize("term", [EightBits, EightBitsBothWays])
@pytest.mark.parametrize("incomplete", ["average", "drop"])
def test_eight_bits(kind: Any, term: type[EightBits], incomplete: str) -> None:
    """Lost updates stay lost; those that the server did not use come with the next."""
    data = make_data()
    budget = short_of_time if incomplete == "average" else at_times
    strategy = RegStrategy([term()], seed=8, incomplete=incomplete, **SOME)
    app = numpy_app([term], data, budget=budget, fate=now_and_then, spoil=put_code(lambda c: c[1:]))
    got = train(strategy, app, kind=kind, rounds=12)
    rounds = turns_of(strategy, data, budget, now_and_then)
    check_models(
        got,
        oracle.quantised(
            start_weights(),
            to_numpy(data),
            rounds,
            LR,
            "num-examples",
            down=term is EightBitsBothWays,
        ),
    )


def wide() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 2000), nn.Tanh(), nn.Linear(2000, 3)).double()


def test_eight_bits_travel_as_an_eighth_of_a_double() -> None:
    data = make_data()
    settings: dict[str, Any] = {"seed": 3, "fraction_evaluate": 0.0}
    entries = {}
    for terms in ([], [EightBits()], [EightBitsBothWays()]):
        strategy = RegStrategy(terms, **settings)
        app = numpy_app([type(t) for t in terms], data, model=wide)
        train(strategy, app, rounds=2, model=wide)
        entries[len(entries)] = strategy.history[-1]
    for k in range(5):
        dense, up, both = (entries[i]["bytes_up"][k] for i in range(3))
        assert 0.12 < up / dense < 0.14
        assert 0.12 < both / dense < 0.14
        dense, up, both = (entries[i]["bytes_down"][k] for i in range(3))
        assert up / dense == pytest.approx(1, abs=0.01)
        assert 0.12 < both / dense < 0.14


HOSTILE: dict[str, Callable[[bytes], Any]] = {
    "empty": lambda code: b"",
    "one byte": lambda code: b"\0",
    "garbage": lambda code: np.random.default_rng(1).bytes(len(code)),
    "truncated": lambda code: code[:-1],
    "half": lambda code: code[: len(code) // 2],
    "longer": lambda code: code + b"\0",
    "NaN": lambda code: code[:1] + struct.pack("<d", np.nan) + code[9:],
    "infinite": lambda code: code[:1] + struct.pack("<d", np.inf) + code[9:],
    "huge": lambda code: code[:1] + struct.pack("<d", 1e300) + code[9:],
    "text": lambda code: "code",
    "a number": lambda code: 7,
    "numbers": lambda code: [1, 2, 3],
    "no code": lambda code: None,
    **{
        f"raises {kind.__name__}": partial(lambda tag, code: bytes([tag]) + code[1:], tag)
        for tag, kind in KINDS.items()
    },
    **{
        f"nonsense {tag}": partial(lambda tag, code: bytes([tag]) + code[1:], tag)
        for tag in NONSENSE
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_code_costs_its_client_alone(name: str) -> None:
    """Client 1's first code is hostile, the second is not; the others make the first round's model."""

    def fate(k: int, turn: int) -> str:
        return "unused" if (k, turn) == (1, 0) else "used"

    data = make_data()
    strategy = RegStrategy([EightBits()], seed=8, fraction_evaluate=0.0)
    app = numpy_app([EightBits], data, fate=fate, spoil=put_code(HOSTILE[name]))
    got = train(strategy, app, kind=SerialisingGrid, rounds=2)
    assert [list(entry["failures"]) for entry in strategy.history] == [[1], []]
    assert len(str(strategy.history[0]["failures"][1])) > 10  # says why
    rounds = turns_of(strategy, data, fate=fate)
    check_models(got, oracle.quantised(start_weights(), to_numpy(data), rounds, LR, "num-examples"))


# a personal model


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


@both_grids
@pytest.mark.parametrize("incomplete", ["average", "drop"])
def test_a_personal_model(kind: Any, incomplete: str) -> None:
    """It is kept whether or not the server used the reply, and evaluated beside the global model."""
    data, lam = make_data(), 0.4
    budget = short_of_time if incomplete == "average" else at_times
    strategy = RegStrategy(
        [Own(lam)], seed=8, incomplete=incomplete, fraction_train=0.6, min_train_nodes=1
    )
    app = numpy_app([Own], data, budget=budget, fate=now_and_then)
    got = train(strategy, app, kind=kind, rounds=6)
    rounds = turns_of(strategy, data, budget, now_and_then)
    assert {t.fate for turns in rounds for t in turns} == {"used", "unused", "lost"}
    clients = to_numpy(data)
    want = oracle.ditto(start_weights(), clients, rounds, LR, "num-examples", lam)
    check_models(got, want)
    for t, entry in enumerate(strategy.history):
        found = entry["evaluate"]["clients"]
        assert sorted(found) == [0, 1, 2, 3, 4]
        for k, metrics in found.items():
            model = want.models[t]
            assert metrics["loss"] == pytest.approx(oracle.mean_loss(model, clients[k]), abs=1e-5)
            u = want.own[t].get(k, model)
            loss, share = oracle.mean_loss(u, clients[k]), oracle.accuracy(u, clients[k])
            assert metrics["personal-loss"] == pytest.approx(loss, abs=1e-5)
            assert metrics["personal-accuracy"] == pytest.approx(share, abs=1e-5)


@dataclass(frozen=True)
class Again(Term):
    """Trains the round's own model a second time, and keeps how far the two are apart."""

    name: ClassVar[str] = "again"
    apart: ClassVar[list[float]] = []

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        def loss(v: Arrays, at: ClientContext) -> Any:
            params = {n.removeprefix("second "): a for n, a in v.items()}
            return at.loss_fn(at.output_at(params), at.targets)

        start = {f"second {n}": a for n, a in ctx.start.items()}
        end = ctx.train(start, loss, ctx.num_steps)
        self.apart.append(
            max(float(abs(end[f"second {n}"] - ctx.start[n] - d).max()) for n, d in delta.items())
        )
        return delta, {}, {}


@pytest.mark.parametrize("place", ["client", "own loop"])
@pytest.mark.parametrize("budget", [None, 5])
def test_a_second_model_sees_the_same_shuffled_batches(place: str, budget: int | None) -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(20, 4, generator=g, dtype=torch.float64)
    dataset = torch.utils.data.TensorDataset(x, torch.arange(20) % 3)
    loaders = [
        torch.utils.data.DataLoader(dataset, batch_size=b, shuffle=True, drop_last=False)
        for b in (4, 6)
    ]
    app: Any = RegClientApp()
    if place == "client":
        app = numpy_app([Again], loaders, budget=lambda _k, _turn: budget)
    else:

        @app.train()
        def loop(message: Message, context: Context) -> Message:
            model = make_model()
            data = loaders[int(context.node_config["partition-id"])]
            loop = ClientRound(message, [Again], model, data, device="cpu", max_steps=budget)
            with loop.seeded():
                optimizer = loop.optimizer(torch.optim.SGD)
                for inputs, targets in loop.batches():
                    optimizer.zero_grad()
                    output = model(inputs)
                    loop.loss(cross_entropy(output, targets), inputs, targets, output).backward()
                    loop.correct()
                    optimizer.step()
                return loop.reply()

    Again.apart.clear()
    strategy = RegStrategy([Again()], seed=3, fraction_evaluate=0.0)
    train(strategy, app, rounds=2, clients=2)
    assert len(Again.apart) == 4
    assert max(Again.apart) < 1e-12


# who weighs


def test_at_most_one_term_weighs() -> None:
    with pytest.raises(ValueError, match=r"nova.*fair|fair.*nova"):
        RegStrategy([Nova(), Fair(1.0)])
    with pytest.raises(ValueError, match="scale"):
        RegStrategy([Fair(1.0)], incomplete="scale")
    with pytest.raises(ValueError, match=r"(?i)dp|privacy"):
        RegStrategy([Nova()], weighting="uniform", privacy=CentralDP(1.0, 0.1))
    RegStrategy([Control()], incomplete="scale")
    RegStrategy([Fair(1.0)], incomplete="drop")
