"""What several test files need: a small model, unequal clients, and a run in one process."""

import logging
import os
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from torch import nn
from torch.utils.data import Dataset

from flwr_regs import InProcessGrid, RegClient
from flwr_regs.client.memory import decode
from flwr_regs.testing import problem
from flwr_regs.testing.problem import Batch as Batch
from flwr_regs.testing.problem import drawn as drawn
from flwr_regs.testing.problem import make_clients as make_clients
from flwr_regs.testing.problem import to_numpy as to_numpy
from flwr_regs.wire.records import from_record

ROOT = Path(__file__).parents[1]
Log = Callable[..., list[str]]
T = TypeVar("T")
QUIET: dict[str, Any] = {"seed": 3, "fraction_evaluate": 0.0}
MANY = 30
"""A test with more marked cells than this is a product, of which a share says most."""
logging.getLogger("flwr").setLevel(logging.ERROR)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``SHARE=0.2``, leave all but so much of each product's `full` cells out, drawn for each run."""
    share = float(os.environ.get("SHARE", "1"))
    run = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))  # the same for all its processes
    cells = [i for i in items if i.get_closest_marker("full") and hasattr(i, "originalname")]
    number = Counter((i.path, i.originalname) for i in cells)
    left_out = {i for i in cells if number[i.path, i.originalname] > MANY and run.random() >= share}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [i for i in items if i not in left_out]


def make_model(
    dtype: torch.dtype = torch.float64, batch_norm: bool = False, drop: float | None = None
) -> nn.Sequential:
    """The perceptron of the laws, with the state_dict names of tests/oracles/model.py."""
    if not batch_norm:
        return problem.make_model(dtype)
    with drawn():
        dropout = [] if drop is None else [nn.Dropout(drop)]
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), *dropout, nn.Tanh(), nn.Linear(6, 3)]
        return nn.Sequential(*layers).to(dtype)


def wide(n: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The perceptron of the laws with n units: 8 n + 3 parameters, which weigh more than their names."""
    with drawn():
        return nn.Sequential(nn.Linear(4, n), nn.Tanh(), nn.Linear(n, 3)).to(dtype)


def still(model: nn.Module, *layers: str) -> nn.Module:
    """A model of which some layers do not train."""
    for layer in layers:
        model.get_submodule(layer).requires_grad_(False)
    return model


norm_model = partial(make_model, batch_norm=True)
dropping = partial(norm_model, drop=0.5)


def run(
    strategy: Any,
    client_class: Callable[..., Any],
    *,
    train: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, np.ndarray]:
    """Train in one process and return the final model by name; `settings` as for `problem.train`."""
    return problem.train(strategy, client_class, length=train, **settings)[-1]


def peak(work: Callable[[], object]) -> int:
    """The most memory that `work` took at a time beyond what was there, in bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def start(
    strategy: Any,
    grid: Any,
    rounds: int = 2,
    model: Callable[[], Any] = make_model,
    config: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Train on a grid, an epoch a round if no `config` says otherwise; return Flower's result.

    `model` returns the model, or its arrays alone.
    """
    config = ConfigRecord({"lr": 0.2, "local-epochs": 1} if config is None else {**config})
    first = model()
    arrays = ArrayRecord(first.state_dict() if isinstance(first, nn.Module) else {**first})
    return strategy.start(grid, arrays, rounds, train_config=config, **more)


def until(what: str, ask: Callable[[], T], seconds: float = 120, pause: float = 0.2) -> T:
    """Return the first true value of `ask`; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := ask()):
        assert time.monotonic() < end, f"after {seconds:.0f} s: not yet {what}"
        time.sleep(pause)
    return value


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Have a function's calls noted; return the list of what each was given and, last, returned."""
    calls, real = list[Any](), getattr(owner, name)

    def noting(*given: Any, **named: Any) -> Any:
        calls.append((*given, returned := real(*given, **named)))
        return returned

    patch.setattr(owner, name, noting)
    return calls


def no_space(*_: Any, **__: Any) -> Any:
    """A write to a disk that is full."""
    raise OSError(28, "No space left on device")


class Tampered(InProcessGrid):
    """Gives each exchange to ``change(kind, partition id, message, reply)``: what it returns is the reply.

    A text is an error in its place.
    """

    def __init__(self, app: Any, n: int, change: Callable[..., Message | str]) -> None:
        super().__init__(app, n)
        self.change = change

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message, i in zip(messages, ids, strict=True):
            kind, pid = message.metadata.message_type, message.metadata.dst_node_id - 1000
            reply = self.change(kind, pid, message, self._replies[i])
            if isinstance(reply, str):
                reply = Message(Error(2, reply), reply_to=message)
            self._replies[i] = reply
        return ids


def claiming(liar: int, **metrics: Any) -> Callable[..., Message]:
    """A change of a grid's replies: what one client says of its training, with _ for -."""
    said = {name.replace("_", "-"): value for name, value in metrics.items()}

    def change(kind: str, pid: int, message: Message, reply: Message) -> Message:
        if (kind, pid) == ("train", liar):
            told = reply.content.metric_records["metrics"]
            reply.content["metrics"] = MetricRecord({**told, **said})
        return reply

    return change


class Watching(Tampered):
    """Notes the kinds of all messages, and the arrays of those that train."""

    def __init__(self, app: Any, n: int) -> None:
        super().__init__(app, n, self._note)
        self.kinds: list[str] = []
        self.sent: list[dict[str, dict[str, np.ndarray]]] = []

    def _note(self, kind: str, pid: int, message: Message, reply: Message) -> Message:
        self.kinds.append(kind)
        if kind == "train":
            records = message.content.array_records
            self.sent.append({name: from_record(record) for name, record in records.items()})
        return reply


class Attended(Watching):
    """Its clients come and go: ``there(partition id, number of train messages so far)``."""

    def __init__(self, app: Any, n: int, there: Callable[[int, int], Any]) -> None:
        super().__init__(app, n)
        self.there = there

    def get_node_ids(self) -> list[int]:
        sent = self.kinds.count("train")
        return [node for node in super().get_node_ids() if self.there(node - 1000, sent)]


def composed(*terms: type[Any]) -> Callable[..., Any]:
    """A client of several terms."""
    return partial(RegClient, terms=terms)


class Items(Dataset[Any]):
    """A map-style data set of what `make` returns for an input and a label."""

    def __init__(self, x: Any, y: Any, make: Any = lambda x, y: (x, y)) -> None:
        self.x, self.y, self.make = x, y, make

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.make(self.x[i], self.y[i])


def budgeted(base: Any, done: Sequence[dict[int, int]]) -> Any:
    """A client class whose step budget depends on (round, partition); `done` repeats."""

    class Budgeted(base):  # type: ignore[misc]
        def fit(self, parameters: Any, config: Any) -> Any:
            budgets = done[(config["server-round"] - 1) % len(done)]
            self.step_budget = budgets.get(config["regs.partition"])
            return super().fit(parameters, config)

    return Budgeted


def close(a: dict[str, Any], b: dict[str, Any], tol: float) -> None:
    """Assert that two models agree by name, element by element."""
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=tol, err_msg=name)


def bits(arrays: ArrayRecord) -> dict[str, bytes]:
    return {n: a.numpy().tobytes() for n, a in arrays.items()}


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> None:
    """A plain step down the cross-entropy of each batch."""
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def plain_fedavg(
    build: Callable[[], nn.Module],
    clients: Sequence[Any],
    rounds: int,
    lr: float,
    own: Collection[str] = (),
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
) -> tuple[dict[str, torch.Tensor], list[nn.Module]]:
    """FedAvg of any model in plain loops: two epochs a round, weights n_k / n.

    Entries of `own` stay with their client, and what travels is `rounded`. Return the global model, and the
    clients' at the end.
    """
    models, shares = [build() for _ in clients], [sum(len(y) for _, y in c) for c in clients]
    state = {n: v.clone() for n, v in build().state_dict().items() if n not in own}
    for _ in range(rounds):
        given = {n: rounded(w) for n, w in state.items()}
        moved = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in state.items()}
        for model, share, batches in zip(models, shares, clients, strict=True):
            model.load_state_dict(given, strict=False)
            trained = [p for p in model.parameters() if p.requires_grad]
            descend(model, torch.optim.SGD(trained, lr=lr), batches * 2)
            end = model.state_dict()
            for n, w in given.items():
                moved[n] += share / sum(shares) * (rounded(end[n]).double() - w.double())
        for n, w in state.items():
            step = moved[n] if w.is_floating_point() else moved[n].round()
            state[n] = w + step.to(w.dtype)
    return state, models


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    """A function to the messages of Flower's logger since it was last called: (part of it, least level)."""
    caplog.set_level(logging.INFO, logger="flwr")

    def messages(part: str = "", level: int = logging.INFO) -> list[str]:
        records = [r for r in caplog.records if r.levelno >= level]
        caplog.clear()
        return [r.getMessage() for r in records if part in r.getMessage()]

    return messages


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def remembered(grid: Any, pid: int) -> dict[str, Any]:
    """What a client of a grid remembers of its last round: slots by term; "regs": private entries."""
    records = grid._contexts[1000 + pid].state.config_records
    (memory,) = (dict(r) for key, r in records.items() if key.endswith(".memory"))
    return decode(memory[max(key for key in memory if key.startswith("round"))])
