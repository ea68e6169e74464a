"""What a term of one's own is told, and may have a say in, written against `flwr_regs` alone."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.functional import cross_entropy

import flwr_regs as fr
from flwr_regs.abilities import Evolves, Weighs
from flwr_regs.testing import problem
from flwr_regs.testing.problem import SerialisingGrid
from tests.conftest import QUIET, Batch, close, dropping, make_model, to_numpy
from tests.oracles import plain_steps as oracle
from tests.oracles.model import logits
from tests.oracles.rounds import examples

Arrays = dict[str, Any]
Slot = dict[str, Any]
LR = 0.2
SIZES = [[5], [4, 3], [5, 2, 4], [3, 3, 3, 1], [6, 5]]
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


def make_data() -> list[list[Batch]]:
    """Five clients with unequal numbers of batches of unequal size, and skewed labels."""
    clients: list[list[Batch]] = [[] for _ in SIZES]
    for k, sizes in enumerate(SIZES):
        g = torch.Generator().manual_seed(200 + k)
        for b in sizes:
            x = torch.randn(b, 4, generator=g, dtype=torch.float64) + 0.3 * k
            clients[k].append((x, torch.randint(0, 2, (b,), generator=g) + k % 2))
    return clients


DATA = make_data()
CLIENTS = to_numpy(DATA)
START = problem.start_weights()


def numpy_app(
    terms: Sequence[type[fr.Term]], data: Any = DATA, model: Any = make_model, **more: Any
) -> Any:
    """An app of the package's clients; `more` holds their settings, `budget` the steps of client 2."""
    budget = more.pop("budget", None)

    def client(net: nn.Module, train: Any, test: Any, **settings: Any) -> Any:
        steps = budget if train is data[2] else None
        return fr.RegClient(net, train, test, terms=terms, step_budget=steps, **settings)

    return problem.app_of(client, data, model, **more)


def train(
    strategy: fr.RegStrategy,
    app: ClientApp,
    rounds: int = 1,
    model: Any = make_model,
    **length: Any,
) -> list[dict[str, np.ndarray]]:
    """Return the global model after each round; messages and states pass through bytes."""
    how: dict[str, Any] = {"clients": DATA, "grid": SerialisingGrid(app, len(DATA)), "model": model}
    return problem.train(strategy, fr.RegClient, rounds=rounds, lr=LR, length=length, **how)


# gradients elsewhere


class Ridge(fr.Term):
    """A part of the loss."""

    name: ClassVar[str] = "ridge"

    def loss(self, base: Any, params: Arrays, ctx: fr.ClientContext) -> Any:
        return base + 0.05 * sum((p**2).sum() for p in params.values())


class Look(fr.Term, Evolves):
    """Looks at gradients here and elsewhere, and changes nothing."""

    name: ClassVar[str] = "look"

    def correct(self, grads: Arrays, params: Arrays, ctx: fr.ClientContext) -> Arrays:
        moved = {n: p + 0.3 * torch.cos(3 * p) for n, p in params.items()}
        there = ctx.gradient_at(moved)
        close(numbers(ctx.gradient_at(params)), numbers(grads), 1e-12)
        close(numbers(ctx.gradient_at(moved)), numbers(there), 0.0)
        note("there", (numbers(moved), numbers(there), ctx.inputs.numpy(), ctx.targets.numpy()))
        return grads

    def evolve(self, grads: Arrays, params: Arrays, ctx: fr.ClientContext) -> Slot:
        close(numbers(ctx.gradient_at(params)), numbers(grads), 1e-12)
        assert not ctx.output.requires_grad  # a slot may hold it, and a later `loss` read that
        return {}


NO_SINGLE = [[batch for batch in client if len(batch[1]) > 1] for client in DATA]
"""The data without batches of one example, which BatchNorm refuses."""


def test_the_gradient_elsewhere_is_that_of_the_whole_loss() -> None:
    """With the losses of all terms, and the corrections to the left of the one that asks."""
    terms = [fr.Proximal(0.3), Look(), Ridge()]
    app = numpy_app([type(t) for t in terms])
    train(fr.RegStrategy(terms, **QUIET), app, **{"local-epochs": 2})
    assert len(NOTES["there"]) == 2 * sum(map(len, DATA))
    for at, got, x, y in NOTES["there"]:
        g = oracle.gradient(at, x, y)
        close(got, {n: g[n] + 2 * 0.05 * v + 0.3 * (v - START[n]) for n, v in at.items()}, 1e-10)


# what a context holds


def smoothed(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output, targets, label_smoothing=0.2)


class Reads(fr.Term):
    """Reads all that a client's context offers."""

    name: ClassVar[str] = "reads"
    needs: ClassVar[Collection[str]] = frozenset({"features", "start_output", "label_counts"})

    def _steps(self, hook: str, ctx: fr.ClientContext) -> None:
        steps = ctx.planned_steps, ctx.budget_steps, ctx.num_steps
        note("always", (hook, ctx.client_id, *steps, ctx.batch_size, ctx.lr, dict(ctx.config)))

    def start(self, params: Arrays, ctx: fr.ClientContext) -> Arrays:
        self._steps("start", ctx)
        return params

    def loss(self, base: Any, params: Arrays, ctx: fr.ClientContext) -> Any:
        self._steps("loss", ctx)
        seen = {
            "params": params,
            "start": ctx.start,
            "x": ctx.inputs,
            "y": ctx.targets,
            "base": base,
            "loss_fn": ctx.loss_fn(ctx.output, ctx.targets),
            "output": ctx.output,
            "output_at": ctx.output_at(params),
            "start_output": ctx.start_output,
            "features": ctx.features,
            "features_at": ctx.features_at(params),
            "features_at_start": ctx.features_at(ctx.start),
            "label_counts": ctx.label_counts,
            "client": torch.tensor(ctx.client_id),
        }
        models = {n: numbers(seen.pop(n)) for n in ("params", "start")}
        note("batch", {**numbers(seen), **models})
        return base

    def correct(self, grads: Arrays, params: Arrays, ctx: fr.ClientContext) -> Arrays:
        self._steps("correct", ctx)
        return grads

    def finish(self, delta: Arrays, ctx: fr.ClientContext) -> tuple[Arrays, Slot, Slot]:
        self._steps("finish", ctx)
        with pytest.raises(RuntimeError, match="gradient_at is there in `correct`"):
            ctx.gradient_at(ctx.start)
        with pytest.raises(RuntimeError, match="output_at and features_at, within a step"):
            ctx.output_at(ctx.start)
        end = {n: ctx.start[n] + d for n, d in delta.items()}
        means = {"loss": ctx.mean_loss(end), "features": ctx.mean_features(end)}
        means["first"] = ctx.mean_features(end, batches=1)
        note("data", (ctx.client_id, numbers(end), numbers(means), numbers(ctx.mean_gradient(end))))
        return delta, {}, {}


near = partial(np.testing.assert_allclose, rtol=0, atol=1e-10)


def test_what_a_term_reads_on_a_client() -> None:
    """Against the oracle's functions; with a step budget, and a key of the user's own."""
    app = numpy_app([Reads], budget=3)
    length = {"local-epochs": 2, "user.key": 7}
    train(fr.RegStrategy([Reads()], **QUIET), app, **length)
    for seen in NOTES["batch"]:
        w, x, y, start = seen["params"], seen["x"], seen["y"], seen["start"]
        near(seen["base"], oracle.loss(w, x, y))
        near(seen["loss_fn"], oracle.loss(w, x, y))
        near(seen["output"], logits(w, x))
        near(seen["output_at"], logits(w, x))
        near(seen["start_output"], logits(start, x))
        near(seen["features"], oracle.features(w, x))
        near(seen["features_at"], oracle.features(w, x))
        near(seen["features_at_start"], oracle.features(start, x))
        labels = np.concatenate([y for _, y in CLIENTS[seen["client"]]])
        near(seen["label_counts"], np.bincount(labels, minlength=3))
        close(start, START, 0.0)
    assert sorted(client for client, *_ in NOTES["data"]) == [0, 1, 2, 3, 4]
    for k, w, means, gradient in NOTES["data"]:
        near(means["loss"], oracle.mean_loss(w, CLIENTS[k]))
        near(means["features"], oracle.mean_features(w, CLIENTS[k]))
        near(means["first"], oracle.mean_features(w, CLIENTS[k][:1]))
        close(gradient, oracle.mean_gradient(w, CLIENTS[k]), 1e-10)
    assert {hook for hook, *_ in NOTES["always"]} == {"start", "loss", "correct", "finish"}
    for hook, k, planned, most, steps, batch_size, lr, config in NOTES["always"]:
        want = 2 * len(DATA[k])
        cut = min(3, want) if k == 2 else want
        assert (planned, most, steps) == (want, cut, cut), hook
        assert batch_size == (0 if hook == "start" else len(DATA[k][0][1]))
        assert lr == config["lr"] == LR
        assert (config["local-epochs"], config["user.key"]) == (2, 7)


def test_functions_leave_no_trace_and_the_loss_is_the_clients_own() -> None:
    """With dropout masks and BatchNorm's statistics, the model is to the bit what it is without them."""
    models, both = [], [Reads(), Look()]
    for terms in (both, []):
        app = numpy_app([type(t) for t in terms], NO_SINGLE, model=dropping, loss_fn=smoothed)
        models.append(train(fr.RegStrategy(terms, **QUIET), app, rounds=2, model=dropping))
    for read, unread in zip(*models, strict=True):
        close(read, unread, 0.0)
    for seen in NOTES["batch"]:
        x, y = torch.from_numpy(seen["output"]), torch.from_numpy(seen["y"])
        assert seen["loss_fn"] == seen["base"] == pytest.approx(smoothed(x, y).item(), abs=1e-12)


# what the server is told


class Server(fr.Term, Weighs):
    """Notes the server's contexts."""

    name: ClassVar[str] = "server-notes"

    def broadcast(self, server: Slot, ctx: fr.ServerContext) -> Slot:
        assert (ctx.weights, ctx.replies, ctx.population) == ({}, {}, 5)
        return {}

    def weigh(
        self, weights: Mapping[int, float], uploads: Mapping[int, Slot], ctx: fr.ServerContext
    ) -> Mapping[int, float]:
        note("weights", (dict(weights), dict(ctx.weights), sorted(uploads)))
        return {k: 0.5 * p for k, p in weights.items()}

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[Any, Any], ctx: fr.ServerContext
    ) -> tuple[Slot, Arrays]:
        note("ctx", ctx)
        note("params", numbers(ctx.params))
        note("previous", None if ctx.previous_step is None else numbers(ctx.previous_step))
        return server, delta


def test_what_a_term_reads_on_the_server() -> None:
    strategy = fr.RegStrategy([Server()], fraction_train=0.6, lr_schedule=lambda t: 1 / t, **QUIET)
    got = train(strategy, numpy_app([Server], budget=3), rounds=4)
    models = [START, *got]
    n = [examples(c) for c in CLIENTS]
    for t, ctx in enumerate(NOTES["ctx"], 1):
        cohort = sorted(strategy.history[t - 1]["cohort"])
        total = sum(n[k] for k in cohort)
        p = {k: pytest.approx(n[k] / total) for k in cohort}
        assert ctx.weights == p
        assert NOTES["weights"][t - 1] == (p, p, cohort)
        assert (ctx.round, ctx.lr, ctx.population) == (t, pytest.approx(LR / t), 5)
        close(NOTES["params"][t - 1], models[t - 1], 0.0)
        if t == 1:
            assert NOTES["previous"][0] is ctx.previous_lr is None
        else:
            step = {k: models[t - 1][k] - models[t - 2][k] for k in START}
            close(NOTES["previous"][t - 1], step, 1e-12)
            assert ctx.previous_lr == pytest.approx(LR / (t - 1))
        assert list(ctx.replies) == cohort
        want = {name: np.zeros_like(a) for name, a in START.items()}
        for k, reply in ctx.replies.items():
            planned = 2 * len(DATA[k])
            steps = 3 if k == 2 else planned
            assert (reply.num_examples, reply.num_steps) == (n[k], steps)
            assert reply.planned_steps == planned
            delta = oracle.moved(models[t - 1], CLIENTS[k], steps, LR / t)
            assert reply.norm == pytest.approx(oracle.square(delta) ** 0.5, abs=1e-9)
            assert np.isfinite(reply.loss)
            want = {m: want[m] + 0.5 * n[k] / total * delta[m] for m in want}
        close(models[t], {m: models[t - 1][m] + want[m] for m in want}, 1e-5)
