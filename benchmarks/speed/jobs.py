"""The jobs that are measured: models, data, bare loops, and whole rounds of ours.

The small job is 100 clients that each take 10 steps of 32 examples on a perceptron 64-64-10.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache, partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import flwr_regs as fr

CLIENTS, STEPS, BATCH, LR = 100, 10, 32, 0.05
WARM, ROUNDS = 2, 5
"""Of a training in which rounds are compared: the first, which do not count, and those that do."""
METHODS: dict[str, Callable[..., Any]] = {
    "FedAvg": fr.FedAvg,
    "FedProx": partial(fr.FedProx, mu=0.1),
    "FedFOR": partial(fr.FedFOR, alpha=0.1),
    "FedADC": fr.FedADC,
    "SCAFFOLD": fr.SCAFFOLD,
    "RFedAvgPlus": partial(fr.RFedAvgPlus, lam=0.1),
    "EFL": partial(fr.EFL, lam=0.1),
    "EFL, ternary": partial(fr.EFL, lam=0.1, density_up=0.05, density_down=0.05),
}
"""Strategies of the small job; a name with "Client" is the client's class."""


def perceptron(*widths: int) -> nn.Sequential:
    """Return a perceptron with these widths, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return fresh(*widths)


def fresh(*widths: int) -> nn.Sequential:
    """Return a perceptron with these widths, with new weights: what a user's ``Net()`` is."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


SMALL = 64, 64, 10


def small() -> nn.Sequential:
    """Return the small job's model, with 4,810 parameters."""
    return perceptron(*SMALL)


def wide(parameters: int) -> nn.Sequential:
    """Return a perceptron of five square layers and an output layer, with about so many parameters."""
    width = max(round((parameters / 5) ** 0.5), 1)
    return perceptron(*[width] * 6, 10)


def convolutions() -> nn.Sequential:
    """Return McMahan et al.'s network for images of 28 x 28, with 1.7 million parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
        )


def count(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in model.parameters())


def examples(number: int, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random inputs of a shape, and labels of ten classes."""
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (number,), generator=made)
    return torch.randn(number, *shape, generator=made), labels


@lru_cache(maxsize=CLIENTS)
def loader(pid: int, steps: int = STEPS) -> DataLoader[Any]:
    """Return a client's data as most users write it: a shuffling DataLoader over tensors."""
    return DataLoader(
        TensorDataset(*examples(BATCH * steps, 64, seed=pid)), batch_size=BATCH, shuffle=True
    )


def client_fn(context: Context, method: str = "FedAvg", steps: int = STEPS) -> Any:
    """Return a client of the small job; beyond the 100th, clients share data."""
    pid = int(context.node_config["partition-id"]) % CLIENTS
    return getattr(fr, f"{method}Client")(fresh(*SMALL), loader(pid, steps), device="cpu")


def clients(number: int, steps: int = STEPS) -> fr.Clients:
    """Return the small job's clients as data; beyond the 100th, they share data."""
    sets = [loader(pid % CLIENTS, steps).dataset for pid in range(number)]
    return fr.Clients(small, sets, batch_size=BATCH, device="cpu")


def app(method: str, steps: int = STEPS) -> Any:
    """Return the ClientApp of a method."""
    return fr.client_app(partial(client_fn, method=method, steps=steps))


def train_config(steps: int = STEPS) -> ConfigRecord:
    """Return the length and learning rate of the small job's rounds."""
    return ConfigRecord({"lr": LR, "local-steps": steps})


def rounds(
    strategy: Any,
    grid: Grid,
    model: nn.Module,
    number: int,
    config: ConfigRecord | None = None,
) -> list[float]:
    """Train; return the seconds of each round, as `start` runs it."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    stamps: list[float] = []
    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        number,
        train_config=config or train_config(),
        evaluate_fn=lambda *_: stamps.append(time.perf_counter()),  # before round 1, and after each
    )
    return [b - a for a, b in pairwise(stamps)]


def side(
    method: str,
    grid: Grid,
    warm: int = 1,
    counted: int = 1,
    fraction: float = 1.0,
    model: Callable[[], nn.Module] = small,
) -> Callable[[], float]:
    """Return what trains the small job's rounds on a grid, and returns the median of their seconds.

    A training of its own each time, in whose rounds a `fraction` of the clients take part. The first `warm`
    rounds do not count: they ask clients who they are, and prepare what later rounds use.
    """

    def run() -> float:
        strategy = METHODS[method](seed=1, fraction_evaluate=0.0, fraction_train=fraction)
        return median(rounds(strategy, grid, model(), warm + counted)[warm:])

    return run


def closed(grid: Any) -> None:
    """End the processes of a grid that has some."""
    with suppress(AttributeError):
        grid.close()


def bare_loader(clients: int) -> float:
    """Return the seconds of the small job as a plain loop over DataLoaders: train, then average."""
    return _bare(clients, loader)


def bare_indexed(clients: int) -> float:
    """As `bare_loader`, but batches are rows of tensors, drawn by one permutation."""
    return _bare(clients, _indexed)


def _indexed(pid: int) -> list[tuple[Tensor, Tensor]]:
    x, y = loader(pid).dataset.tensors  # type: ignore[attr-defined]
    order = torch.randperm(len(y))
    return [(x[part], y[part]) for part in order.split(BATCH)]


def _bare(clients: int, batches: Callable[[int], Any]) -> float:
    model = small()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    began = time.perf_counter()
    total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in start.items()}
    for pid in range(clients):
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(start[n])
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for x, y in batches(pid):
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(x), y).backward()
            optimizer.step()
        for n, p in model.named_parameters():
            total[n] += p.detach() / clients
    return time.perf_counter() - began


def bare_vmap(clients: int) -> float:
    """Return the seconds of the small job with all clients in one set of kernels: a prototype."""
    model = small()

    def loss(params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, dict(params), (x,)), y)

    step = vmap(grad(loss))
    began = time.perf_counter()
    data = [_indexed(pid) for pid in range(clients)]
    start = {n: p.detach() for n, p in model.named_parameters()}
    params = {n: p.expand(clients, *p.shape).clone() for n, p in start.items()}
    for t in range(STEPS):
        x, y = (torch.stack([batches[t][i] for batches in data]) for i in (0, 1))
        for n, g in step(params, x, y).items():
            params[n] -= LR * g
    for p in params.values():
        p.double().mean(0)
    return time.perf_counter() - began


@cache
def _two_processes() -> ProcessPoolExecutor:
    spawned = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(2, spawned, initializer=torch.set_num_threads, initargs=(1,))


def bare_vmap_halves(clients: int) -> float:
    """As `bare_vmap`, half of the clients in each of two processes: what a second core adds."""
    began = time.perf_counter()
    list(_two_processes().map(bare_vmap, [clients // 2] * 2))
    return time.perf_counter() - began


def bare_steps(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Take a step on each batch on a copy of the model, as plain torch does."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for x, y in batches:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(x), y).backward()
        optimizer.step()


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model."""
    return copy.deepcopy(model)


def plain_app() -> ClientApp:
    """Return Flower's own ClientApp on the small job, with nothing of ours."""
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        model, pid = fresh(*SMALL), int(context.node_config["partition-id"]) % CLIENTS
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for x, y in loader(pid):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": BATCH * STEPS}),
        }
        return Message(RecordDict(content), reply_to=message)

    return made
