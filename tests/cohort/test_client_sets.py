"""Clients as data: what each kind of data set gives, on each grid and in Flower's app; what is refused."""

import multiprocessing
from functools import partial
from pathlib import Path
from threading import Lock
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import flwr_regs as fr
from flwr_regs.cohort import stacked_training
from flwr_regs.cohort.stacks import Stacks
from flwr_regs.testing import problem
from flwr_regs.wire import worker_pool
from tests import conftest
from tests.conftest import Items, Log, close, noted
from tests.flower.stacks import SIZES, kept_by, pair, perceptron


def loader(k: int) -> Any:
    return DataLoader(TensorDataset(*pair(k)), 8, shuffle=True)


KINDS: dict[str, Any] = {
    "pairs of arrays": [[a.numpy() for a in pair(k)] for k in range(5)],
    "data sets": [Items(*pair(k)) for k in range(5)],
    "mappings": [Items(*pair(k), lambda x, y: {"x": x, "kind": y}) for k in range(5)],
    "loaders": {k: loader(k) for k in range(5)},
    "functions": [pair] * 5,
    "a function for all": pair,
    "a partitioner": SimpleNamespace(  # as those of flwr-datasets
        num_partitions=len(SIZES), load_partition=lambda pid: Items(*pair(pid))
    ),
}
MORE = {"mappings": {"target_key": "kind"}, "a function for all": {"num_clients": 5}}


def trained(grid: Any, method: str = "SCAFFOLD", **settings: Any) -> dict[str, np.ndarray]:
    """Return the model after two rounds."""
    strategy = getattr(fr, method)(seed=3, **settings)
    model = run(strategy, grid)
    assert not strategy.history[-1]["failures"]
    return model


def run(
    strategy: Any, grid: Any, rounds: int = 2, model: Any = perceptron, train: Any = None
) -> dict[str, np.ndarray]:
    """Return the model after some rounds."""
    how = {"lr": 0.1, "train": train or {"local-epochs": 1}}
    return conftest.run(strategy, fr.RegClient, rounds=rounds, model=model, grid=grid, **how)


def clients_of(train: Any, **more: Any) -> fr.Clients:
    """Return clients on the CPU, with test sets."""
    settings = {"batch_size": np.int64(8), "device": "cpu", **more}
    return fr.Clients(perceptron, train, [pair(k) for k in range(5)], **settings)


def app_of(kind: Any, model: Any = perceptron) -> Any:
    """Return the app of the same clients."""
    return problem.app_of(kind, [loader(k) for k in range(5)], model)


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return trained(fr.InProcessGrid(app_of(fr.SCAFFOLDClient), 5))


@pytest.mark.parametrize("kind", KINDS)
def test_data_sets_of_any_kind_train_as_the_clients_that_hold_them(
    kind: str, expected: dict[str, np.ndarray]
) -> None:
    """On each grid, and in Flower's app."""
    clients = clients_of(KINDS[kind], **MORE.get(kind, {}))
    stacked = fr.StackedGrid(clients)
    close(trained(stacked), expected, 1e-5)
    assert not stacked.fallbacks
    close(trained(fr.InProcessGrid(clients)), expected, 0.0)
    close(trained(fr.InProcessGrid(clients.app(fr.SCAFFOLDClient), 5)), expected, 0.0)


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("grid", [fr.InProcessGrid, fr.StackedGrid])
def test_a_model_that_is_given_is_the_same_afterwards(grid: Any, messages: bool) -> None:
    model = perceptron(nn.BatchNorm1d(8))
    model[1].eval()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    clients = fr.Clients(model, [pair(k) for k in range(5)], [pair(0)] * 5, device="cpu")
    sends = {"push_messages": lambda self, sent: fr.InProcessGrid.push_messages(self, sent)}
    kind = type("Mine", (grid,), sends if messages else {})
    run(fr.FedAvg(seed=3), kind(clients), model=lambda: model)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert [m.training for m in model.modules()] == [True, True, False, True]


def test_step_budgets_are_kept_on_every_way() -> None:
    """Client 2 takes one step in round 2."""
    budgets = {(2, 2): 1}
    clients = clients_of([pair] * 5, step_budgets=lambda *at: budgets.get(at))
    ways = [(clients.app(fr.FedProxClient), 5), (clients,)]
    grids = [kind(*way) for kind in (fr.InProcessGrid, fr.StackedGrid) for way in ways]
    models = [trained(grid, "FedProx", mu=0.1) for grid in grids]
    assert all(np.allclose(m["0.weight"], models[0]["0.weight"], atol=1e-5) for m in models)
    plain = trained(fr.StackedGrid(clients_of([pair] * 5)), "FedProx", mu=0.1)
    assert not np.allclose(models[0]["0.weight"], plain["0.weight"])
    clients.step_budgets = {2: 1}
    assert [clients.step_budget(k, 1) for k in (1, 2)] == [None, 1]


def as_app(kind: Any, clients: fr.Clients) -> fr.InProcessGrid:
    return kind(clients.app(fr.FedBNClient), len(clients))


APPS = [partial(as_app, kind) for kind in (fr.InProcessGrid, fr.StackedGrid)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("grid", [fr.InProcessGrid, fr.StackedGrid, *APPS])
def test_a_client_that_comes_later_begins_with_the_private_entries_as_given(
    grid: Any, shared: bool
) -> None:
    """Whoever trained or evaluated in the model before."""

    def model() -> nn.Module:
        return perceptron(nn.BatchNorm1d(8))

    given = model() if shared else model
    clients = fr.Clients(given, pair, pair, num_clients=5, batch_size=8, device="cpu")

    ends = [
        run(fr.FedBN(seed=3, fraction_train=0.4), places, 4, model)
        for places in (grid(clients), fr.InProcessGrid(app_of(fr.FedBNClient, model), 5))
    ]
    close(*ends, 1e-5)


@pytest.mark.parametrize("method", [pytest.param("SCAFFOLD", marks=pytest.mark.full), "EFL"])
def test_workers_that_train_stacks_give_what_one_stack_gives(method: str) -> None:
    """Of slots and coded updates too, to the bit; the check runs in each."""
    given = {} if method == "SCAFFOLD" else {"lam": 0.1, "density_up": 0.3, "density_down": 0.3}
    models = []
    for number in (1, 2):
        clients = fr.Clients(perceptron, [pair(k) for k in range(5)], batch_size=8, device="cpu")
        grid = fr.StackedGrid(clients, workers=number)
        models.append((trained(grid, method, fraction_evaluate=0.0, **given), kept_by(grid)))
        assert not grid.fallbacks
        grid.close()
    (model, kept), (spread, theirs) = models
    close(spread, model, 0.0)
    close(theirs, kept, 0.0)


@pytest.mark.full
def test_clients_of_a_stack_whose_process_is_killed_train_one_by_one() -> None:
    """In that round; in the next one, another process trains them."""
    clients = fr.Clients(perceptron, [pair(k) for k in range(5)], batch_size=8, device="cpu")
    grid = fr.StackedGrid(clients, workers=2)

    def kill(entry: Any) -> None:
        if entry["round"] == 1:
            victim = next(iter(grid._local._processes.running.values()))  # type: ignore[union-attr]
            victim.kill()
            victim.join()

    strategy = fr.SCAFFOLD(seed=3, fraction_evaluate=0.0, on_round=kill)
    model = run(strategy, grid, 3)
    grid.close()
    assert grid.fallbacks == {"a process that trains a stack ended with exit code -9 (SIGKILL)": 3}
    one = fr.StackedGrid(clients)
    close(model, run(fr.SCAFFOLD(seed=3, fraction_evaluate=0.0), one, 3), 1e-5)
    close(kept_by(grid), kept_by(one), 1e-5)


def test_arrays_pass_between_processes_and_leave_no_file(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    sent = {"a": np.arange(3), "none": np.zeros(0), "b": np.ones(2)}
    worker_pool._send(here, [str(tmp_path / "full"), str(tmp_path)], sent)  # the first has no room
    assert len([*tmp_path.iterdir()]) == 1
    assert worker_pool._read(there)["b"].tolist() == [1.0, 1.0]
    assert not any(tmp_path.iterdir())


class Sum(nn.Module):
    """A layer whose weight is the sum of two parameters: autograd gives both one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.d = (nn.Parameter(torch.full((3, 6), of)) for of in (0.1, 0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.w + self.d)


@pytest.mark.parametrize("of", [fr.FedAvg, partial(fr.FedSAM, rho=0.1)], ids=["FedAvg", "FedSAM"])
@pytest.mark.parametrize("clip", [{"clip-norm": 0.01}, {}], ids=["clip", "nesterov"])
def test_parameters_with_one_gradient_are_stepped_as_alone(of: Any, clip: dict[str, Any]) -> None:
    """Clipping and optimisers write to gradients."""
    made = partial(torch.optim.SGD, nesterov=not clip, momentum=0.0 if clip else 0.9)
    sets = [pair(k) for k in range(3)]
    clients = fr.Clients(Sum, sets, batch_size=8, device="cpu", optimizer=made)
    stacked, alone = fr.StackedGrid(clients, check=False), fr.InProcessGrid(clients)
    ends = (
        run(of(seed=3, fraction_evaluate=0.0), grid, model=Sum, train={"local-steps": 4, **clip})
        for grid in (stacked, alone)
    )
    close(*ends, 1e-6)
    assert not stacked.fallbacks


def test_what_stays_with_an_apps_client_begins_as_it_makes_it() -> None:
    """In each training on a grid, and where an attempt has failed before."""
    failing: list[str] = []

    def made(params: Any, lr: float) -> Any:
        if failing:
            raise OSError(failing.pop())
        return torch.optim.SGD(params, lr)

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 3)
        return nn.Sequential(nn.Unflatten(1, (2, 3)), *layers)

    def client_fn(context: Any) -> Any:
        data = [pair(context.node_config["partition-id"])]
        return fr.FedBNClient(model(), data, optimizer=made, device="cpu")

    def end(*failures: str) -> Any:
        failing[:] = failures
        strategy = fr.FedBN(seed=3, fraction_evaluate=0.0, min_replies=3, retries=2)
        return run(strategy, grid, 2, model)

    grid = fr.StackedGrid(fr.client_app(client_fn), 3)
    first = end()
    assert "its convolutions are slower in a stack on a CPU" in grid.fallbacks
    for failures in ((), ("disk",), ("disk", "full")):
        close(end(*failures), first, 0.0)


def as_it_is(graph: Any, given: Any, options: Any) -> Any:
    """Compile nothing; take, as compiled code does, tensors that lie in memory as these.

    In threads of compiled code, an index out of range would end the process.
    """
    assert options["cpp.threads"] == 1

    def step(*now: Any) -> Any:
        assert [t.stride() for t in now] == [t.stride() for t in given]
        return graph(*now)

    return step


def halving(by_hook: bool, params: Any, lr: float) -> Any:
    """Return SGD whose rate halves with each step, by a hook or in a step of its own."""
    made = torch.optim.SGD(params, lr=lr)
    step, group = made.step, made.param_groups[0]
    if by_hook:
        made.register_step_post_hook(lambda *_: group.update(lr=group["lr"] / 2))
    else:
        made.step = lambda: group.update(lr=group["lr"] / 2) or step()  # type: ignore[assignment]
    return made


CHANGED = [{"momentum": 0.9}, {"clip-norm": 0.1}, partial(halving, False), partial(halving, True)]


@pytest.mark.parametrize("changed", [{}, *CHANGED], ids=["", "momentum", "clip", "step", "hook"])
@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_compiled_step_gives_the_same_up_to_rounding(
    changed: Any, eager: bool, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    """Buffers, and what dropout draws, too: a step that is traced anew draws what a kept one draws."""
    config, optimizer = ({}, changed) if callable(changed) else (changed, None)
    monkeypatch.setattr(stacked_training, "_STEPS", steps := {})
    if eager:  # compiling takes half a minute
        monkeypatch.setattr(torch._inductor, "compile", as_it_is)

    def end(drop: float, compile: bool, number: int = 3, of: Any = range(5)) -> Any:
        model = perceptron(nn.BatchNorm1d(8), nn.Dropout(drop))
        how = {"batch_size": 8, "device": "cpu", "optimizer": optimizer}
        grid = fr.StackedGrid(fr.Clients(model, [*map(pair, of)], **how), compile=compile)
        strategy = fr.FedAvg(seed=3, fraction_evaluate=0.0)
        got = run(strategy, grid, model=lambda: model, train={"local-steps": number, **config})
        assert not grid.fallbacks
        return got

    close(end(0.0, True), end(0.0, False), 1e-5)
    close(first := end(0.5, True), end(0.5, True), 0.0)
    assert len({*steps.values()}) == 2
    for longer in (2, 4):  # the batches then lie in memory otherwise
        close(end(0.0, True, longer, [0, 0]), end(0.0, False, longer, [0, 0]), 1e-5)
    assert not log("not compiled")
    close(first, end(0.5, False), 1e-5)


def test_clients_train_alone_where_a_compiled_step_fails_within_its_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that runs out of a GPU's memory: some of the parameters are new, others are not."""

    def compiled(graph: Any, given: Any, options: Any) -> Any:
        def step(*now: Any) -> Any:
            calls.append(now)
            if len(calls) == 2:
                now[0].add_(1.0)
                raise RuntimeError("out of memory")
            return graph(*now)

        return step

    calls: list[Any] = []
    monkeypatch.setattr(stacked_training, "_STEPS", {})
    monkeypatch.setattr(torch._inductor, "compile", compiled)
    grids = [fr.StackedGrid(clients_of([pair(0)] * 5), compile=on) for on in (True, False)]
    close(*(trained(grid, "FedAvg") for grid in grids), 1e-5)
    assert len(calls) == 2
    assert grids[0].fallbacks == {"a compiled step has failed within its update": 5}


class Scaled(nn.Module):
    """A model with an embedding that reads its attributes, its class, and a number of the batch."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale, self.shift = perceptron(), 1.0, torch.zeros(3)
        self.signs = nn.Embedding(2, 6, _weight=torch.ones(2, 6))

    def forward(self, x: Any, number: float) -> Any:
        """Return the logits."""
        shifted = x + self.signs(sum(x[:, 0] > at for at in (0, 9)))
        return self.layers(shifted) * self.scale * self.factor * number + self.shift


def test_what_a_step_reads_beside_tensors_counts_when_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    """What differs between batches, rounds and trainings; and an index beyond the embedding's.

    Without a compiler, or for a model that cannot be pickled, the log has one sentence.
    """

    def end(compile: bool, beyond: int = 0, own: Any = None) -> dict[str, np.ndarray]:
        def change(entry: Any) -> None:
            to, forward, after = model.layers, nn.Sequential.forward, entry["round"]
            to.forward = MethodType(lambda self, x, k=after == 1: forward(self, x) * (1 + k), to)
            model.scale *= 1 + (after == 3)
            model.shift += after == 4

        model, (x, y) = Scaled(), pair(0)
        model.own = own
        each = [x + beyond, x, x, x]
        sets = [[{"x": x, "number": 1.0 + k % 2, "labels": y}] for k, x in enumerate(each)]
        clients = fr.Clients(model, sets, target_key="labels", device="cpu")
        strategy = fr.FedAvg(seed=3, fraction_evaluate=0.0, on_round=change)
        return run(strategy, fr.StackedGrid(clients, compile=compile), 5, lambda: model)

    monkeypatch.setattr(torch._inductor, "compile", None)
    end(True)
    assert len(log("not compiled")) == 1
    monkeypatch.setattr(torch._inductor, "compile", as_it_is)
    for Scaled.factor, beyond in ((1.0, 0), (1.0, 0), (0.5, 0), (0.5, 10)):
        close(end(True, beyond), end(False, beyond), 1e-5)
    assert not log("not compiled")
    close(end(True, own=Lock()), end(False), 1e-5)
    assert len(log("not compiled")) == 1


def test_label_counts_are_shared_as_data_but_by_an_apps_client_only_if_it_says_so() -> None:
    trained(fr.StackedGrid(clients_of([pair] * 5)), "FedAvg", cohorts="class-covering")
    with pytest.raises(RuntimeError, match="does not share its label counts"):
        trained(fr.StackedGrid(app_of(fr.FedAvgClient), 5), "FedAvg", cohorts="class-covering")


def test_a_strategy_with_messages_of_its_own_reaches_them() -> None:
    class Mine(fr.FedAvg):
        method = "FedAvg"

        def configure_train(self, *args: Any) -> Any:
            """Note the messages."""
            self.sent = list(super().configure_train(*args))
            return self.sent

    grid, strategy = fr.StackedGrid(clients_of([pair] * 5)), Mine(seed=3)
    run(strategy, grid, rounds=1)
    assert len(strategy.sent) == 5
    assert sum(grid.fallbacks.values()) == 5


X, Y = pair(0)
TWO = SimpleNamespace(load_partition=pair, partitioners={"train": 1, "test": 2})
SERIES = SimpleNamespace(tolist=lambda: [1, 2, 3])
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an empty set": ([(X, Y), (X[:0], Y[:0])], {}, "train_sets: client 1 has an empty data set"),
    "unequal lengths": ([(X, Y), (X, Y[1:])], {}, r"client 1 has inputs of shape \(20, 6\)"),
    "three tensors": ([(X, Y, Y)], {}, "client 0 has 3 tensors"),
    "no data": ([(X, Y), 7], {}, "train_sets: client 1"),
    "no tensors": ([([[1.0]], [0])], {}, "client 0: train_data is a tuple of lists of num"),
    "no clients": ([], {}, "train_sets is empty"),
    "one pair": ((X, Y), {}, "a data set for each client"),
    "a function alone": (pair, {}, "say num_clients="),
    "a function for none": (pair, {"num_clients": 0}, "num_clients must be"),
    "fewer than said": ([(X, Y)] * 2, {"num_clients": 3}, "2 entries, but num_clients is 3"),
    "two partitioners": (TWO, {}, "must have one partitioner, not 2"),
    "fewer test sets": ([(X, Y)] * 2, {"test_sets": [(X, Y)]}, "test_sets has 1 entries"),
    "budgets below 0": ([(X, Y)] * 2, {"step_budgets": [1, -1]}, r"step_budgets\[1\] must be"),
    "one budget": ([(X, Y)] * 2, {"step_budgets": 1}, "an entry for each client, .* not 1"),
    "an array": ([(X, Y)] * 2, {"step_budgets": np.ones(3, int)}, "has 3 entries"),
    "a Series": ([(X, Y)] * 2, {"step_budgets": SERIES}, "has 3 entries"),
    "no function": ([(X, Y)], {"output_fn": 3}, "output_fn must be a function"),
    "a budget for none": ([(X, Y)] * 2, {"step_budgets": {2: 1}}, "0 to 1, there is no 2"),
    "no model": ([(X, Y)], {"model": 3}, "model must be an nn.Module"),
    "no batch": ([DataLoader(TensorDataset(X, Y), 99, drop_last=True)], {}, "yields no batch"),
    "no batch size": ([(X, Y)], {"batch_size": 0}, "batch_size"),
    "no GPU": ([(X, Y)], {"device": "gpu" if torch.cuda.is_available() else "cuda"}, "CUDA|gpu"),
    "no device": ([(X, Y)], {"device": "gpu"}, "device must be 'auto', or one .* not 'gpu'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_by_name(case: str) -> None:
    train, more, message = WRONG[case]
    with pytest.raises((ValueError, TypeError), match=message):
        fr.Clients(**{"model": perceptron, "train_sets": train, **more})


def test_a_function_that_gives_no_data_fails_its_client_by_name() -> None:
    clients = fr.Clients(perceptron, [pair, lambda k: (X[:0], Y[:0])], device="cpu")
    strategy = fr.FedAvg(seed=3, fraction_evaluate=0.0, min_replies=1)
    run(strategy, fr.StackedGrid(clients), rounds=1)
    assert "client 1 has an empty data set" in strategy.history[0]["failures"][1]
    assert "2 clients of perceptron" in repr(clients)
    streamed = DataLoader(type("Stream", (IterableDataset,), {"__iter__": iter})())  # no length
    assert len(fr.Clients(perceptron, [streamed])) == 1


GOOD, (X1, Y1) = pair(0), pair(1)
BEFORE: dict[str, tuple[dict[str, Any], float, str]] = {
    # what is wrong: what Clients get, the share that evaluates, what is said
    "no test set": ({}, 1.0, "no test sets to evaluate on: give Clients test_sets=, or set frac"),
    "too few clients": ({"train_sets": [GOOD]}, 0.0, "min_available_nodes is 2, but the grid's cl"),
    "another shape": ({"model": nn.Sequential(nn.Linear(6, 3))}, 0.0, r"\(8, 6\), but \(3, 6"),
    "another layer": ({"model": nn.Identity}, 0.0, "'0.weight', but the clients' model has no"),
    "labels": ({"train_sets": [GOOD, (X1, Y1 + 3)]}, 0.0, "train_sets: client 1: a label is"),
    "precision": ({"test_sets": [GOOD, (X1.double(), Y1)]}, 1.0, "test_sets: client 1: the inputs"),
}


@pytest.mark.parametrize("wrong", BEFORE)
@pytest.mark.parametrize("kind", [fr.StackedGrid, fr.InProcessGrid])
def test_what_would_end_round_1_is_found_before(kind: Any, wrong: str) -> None:
    given, share, said = BEFORE[wrong]
    sets = {"train_sets": [pair(0), pair(1)], **given}
    clients = fr.Clients(**{"model": perceptron, **sets}, device="cpu")
    strategy = fr.FedAvg(seed=3, fraction_evaluate=share)
    with pytest.raises(ValueError, match=said):
        run(strategy, kind(clients))
    assert strategy.history == []


def test_what_clients_need_of_the_config_is_asked_for_before_round_1() -> None:
    strategy, grid = fr.FedAvgM(fraction_evaluate=0.0), fr.InProcessGrid(clients_of([GOOD] * 5))
    for config, said in (({}, "lacks the key 'lr'"), ({"lr": 0.1}, "must set either")):
        with pytest.raises(ValueError, match=said):
            strategy.start(grid, perceptron().state_dict(), 1, train_config=ConfigRecord(config))


@pytest.mark.parametrize("kind", [fr.StackedGrid, fr.InProcessGrid])
def test_a_label_that_the_loss_ignores_is_not_refused(kind: Any) -> None:
    loss, (x, y) = nn.CrossEntropyLoss(ignore_index=9), pair(1)
    sets = [pair(0), (x, y.clone().index_fill(0, torch.tensor([1]), 9))]
    model = nn.Sequential(*perceptron(), nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    clients = fr.Clients(model, sets, loss_fn=loss, device="cpu")
    trained(kind(clients), "FedAvg", fraction_evaluate=0.0)


@pytest.mark.parametrize("kind", [fr.StackedGrid, fr.InProcessGrid])
def test_an_example_that_is_not_finite_is_named_in_a_stack_too(kind: Any) -> None:
    x, y = (part.clone() for part in pair(2))
    x[3, 0] = float("nan")
    model, sets = perceptron(), [pair(0), pair(1), (x, y.numpy())]
    with (
        pytest.raises(ValueError, match="train_sets: client 2: example 3 holds NaN or infinity"),
        torch.device("meta"),  # as a user's default device, which has no say
    ):
        fr.Clients(model, sets, device="cpu").check(False, {})
    # one that is made when the client first takes part
    clients = fr.Clients(perceptron, [pair(0), pair(1), lambda k: (x, y)], device="cpu")
    strategy = fr.FedAvg(seed=1, fraction_evaluate=0.0)
    run(strategy, kind(clients))
    assert list(strategy.history[0]["failures"]) == [2]
    assert "example 3 of train_data holds NaN" in strategy.history[0]["failures"][2]
    with pytest.raises(TypeError, match=r"StackedGrid\(clients\), not Clients"):
        run(strategy, clients)


def test_an_error_of_all_clients_is_said_once_with_what_helps_first(log: Log) -> None:
    """Neither by the stack, as torch says it, nor by a line for each client."""
    wide = [lambda k: (nn.functional.pad(pair(k)[0], (0, 3)), pair(k)[1])] * 5  # looked at later
    strategy = fr.FedAvg(seed=3, fraction_evaluate=0.0)
    with pytest.raises(fr.RoundFailed) as failed:
        run(strategy, fr.StackedGrid(clients_of(wide)))
    text = "\n".join([*log(), str(failed.value)])
    remedy, raw = "a linear layer of the model gets", "shapes cannot be multiplied"
    assert text.index(remedy) < text.index(raw)
    assert (text.count(remedy), text.count(raw)) == (1, 1)
    assert "Expected size" not in text  # as the stack has it
    assert "5 clients (partitions 0-4) failed: ValueError: an example has the shape" in text


@pytest.mark.parametrize("method", ["FedAvg", "FedBN", "Ditto"])
def test_clients_evaluate_in_a_stack_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """On test sets of unequal sizes, of which two are equal; together where they share the model."""
    together = noted(monkeypatch, Stacks, "evaluate")

    def history(kind: Any) -> Any:
        sets = [pair(k) for k in range(5)]
        model = perceptron(nn.BatchNorm1d(8))
        clients = fr.Clients(model, sets, sets, batch_size=8, device="cpu")
        strategy = getattr(fr, method)(seed=3)
        run(strategy, kind(clients), model=lambda: model)
        return [entry["evaluate"] for entry in strategy.history]

    expected, actual = history(fr.InProcessGrid), history(fr.StackedGrid)
    assert [len(came) for *_, came in together] == ([5, 5] if method == "FedAvg" else [0, 0])
    for entry, want in zip(actual, expected, strict=True):
        assert entry.keys() == want.keys()
        for pid, of_client in want["clients"].items():
            assert entry["clients"][pid] == pytest.approx(of_client, 1e-5)


def test_an_evaluation_in_a_stack_fails_for_the_client_whose_labels_are_out_of_range() -> None:
    def squares(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wanted = nn.functional.one_hot(y, output.shape[1])
        return (output.softmax(1) - wanted).square().mean()

    tests = [
        DataLoader(TensorDataset(x, y + 7 * (k == 1)), 8) for k in range(3) for x, y in [pair(k)]
    ]
    clients = fr.Clients(perceptron, [*map(pair, range(3))], tests, loss_fn=squares, device="cpu")
    strategy = fr.FedAvg(seed=3)
    run(strategy, fr.StackedGrid(clients))
    assert [*strategy.history[0]["evaluate"]["failures"]] == [1]


def test_a_round_that_is_tried_again_begins_with_private_entries_as_they_were() -> None:
    models = []
    for fails in (0, 1):
        left = [OSError("the disk is away")] * fails

        def flaky(k: int, left: list[OSError] = left) -> Any:
            if k == 3 and left:
                raise left.pop()
            return pair(k)

        strategy = fr.FedPer("1.*", seed=3, retries=1, min_replies=5, retry_cohort="same")
        models.append(run(strategy, fr.InProcessGrid(clients_of([flaky] * 5))))
        assert len(strategy.history[0].get("attempts", [])) == fails
    close(*models, 0.0)


def test_after_a_round_without_a_usable_reply_an_apps_client_tests_what_it_had() -> None:
    def client_fn(context: Any) -> Any:
        k, model = context.node_config["partition-id"], perceptron()
        model[0].bias.requires_grad_(k % 2 == 0)  # half against half: no reply is used
        return fr.FedPerClient(model, loader(k), DataLoader(TensorDataset(*pair(k)), 8))

    told = []
    for grid in (fr.InProcessGrid, partial(fr.StackedGrid, memory=1)):
        run(strategy := fr.FedPer("1.*", seed=3), grid(fr.client_app(client_fn), 4), rounds=1)
        assert not strategy.history[0]["replies"]
        told.append(strategy.history[0]["evaluate"]["clients"])
    assert told[0] == told[1]
