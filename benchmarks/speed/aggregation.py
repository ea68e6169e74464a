"""Aggregation: from replies to the new model, against Flower's FedAvg on the same; time and memory."""

from __future__ import annotations

import gc
import logging
import os
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from torch import nn

import flwr_regs as fr
from benchmarks.speed import jobs
from benchmarks.speed.timing import (
    ALLOWED,
    Effort,
    Row,
    interleaved,
    ratios,
    say,
    spread,
    thread_counts,
    threads,
    timed,
)

SIZES = ((10, 4_900_000), (20, 25_000_000))
"""Clients, and parameters."""
DENSITY = 0.01


@dataclass
class Replies:
    """One round's replies, made again for each call of `seconds`; making them is not timed.

    `clients` are canned for a strategy that takes any client of Flower's, else the package's own, which
    take a step on one example.
    """

    build: Callable[[], Any]
    model: nn.Module
    number: int
    canned: bool = True
    strategy: Any = field(init=False)
    round: int = 0

    def __post_init__(self) -> None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self.arrays = ArrayRecord(self.model.state_dict())
        self.config = ConfigRecord({"lr": jobs.LR, "local-steps": 1})
        app = canned(self.model, self.number) if self.canned else _own(self.build, self.model)
        self.grid = fr.InProcessGrid(app, self.number)
        self.strategy = self.build()
        self.strategy.prepare(1000, None, self.config, ConfigRecord({}))

    def next(self) -> list[Message]:
        """Begin a round and return its replies."""
        self.round += 1
        messages = self.strategy.configure_train(self.round, self.arrays, self.config, self.grid)
        return list(self.grid.send_and_receive(messages))

    def end(self, replies: Sequence[Message]) -> None:
        """End the round: what is measured."""
        self.arrays, _ = self.strategy.aggregate_train(self.round, replies)

    def seconds(self) -> float:
        """Return the seconds from the replies to the new model."""
        return timed(partial(self.end, self.next()))

    def models_of_memory(self) -> float:
        """Return the peak of memory while a round ends, in models of float32 beyond the replies."""
        return _peak(partial(self.end, self.next())) / _bytes(self.model)


@dataclass
class Flowers:
    """Flower's FedAvg on canned replies; the methods are those of `Replies`."""

    model: nn.Module
    number: int

    def __post_init__(self) -> None:
        self.grid = fr.InProcessGrid(canned(self.model, self.number), self.number)
        self.strategy = FlowersFedAvg(fraction_train=1.0, fraction_evaluate=0.0)
        self.replies = self._next()

    def _next(self) -> list[Message]:
        arrays, config = ArrayRecord(self.model.state_dict()), ConfigRecord({"lr": jobs.LR})
        return list(
            self.grid.send_and_receive(self.strategy.configure_train(1, arrays, config, self.grid))
        )

    def seconds(self) -> float:
        """Return the seconds from the replies to the new model."""
        return timed(partial(self.strategy.aggregate_train, 1, self.replies))

    def models_of_memory(self) -> float:
        """Return the peak of memory of this, in models of float32 beyond the replies."""
        end = partial(self.strategy.aggregate_train, 1, self.replies)
        return _peak(end) / _bytes(self.model)


def measure(effort: Effort) -> list[Row]:
    """Return a row for each number of threads, size and strategy."""
    rows: list[Row] = []
    for threads_ in thread_counts(effort):
        with threads(threads_):
            for at, (number, parameters) in enumerate([(4, 500)] if effort.quick else SIZES):
                found = _measure(effort, number, parameters, at == 0)
                rows += [row | {"threads": threads_} for row in found]
    return rows


def _measure(effort: Effort, number: int, parameters: int, every: bool) -> list[Row]:
    """Return the rows of one size; what it holds is gone when it returns."""
    model = jobs.wide(parameters)
    say(f"aggregation: {number} x {jobs.count(model):,} parameters, {os.environ[ALLOWED]} threads")
    sides: dict[str, Any] = {"Flower": Flowers(model, number)}
    for name, build, is_canned in _strategies(every):
        sides[name] = Replies(build, model, number, is_canned)
    found = interleaved({n: s.seconds for n, s in sides.items()}, effort, "aggregation")
    rows = []
    for name, side in sides.items():
        say(f"  memory: {name}")
        rows.append(
            {
                "clients": number,
                "parameters": jobs.count(model),
                "side": name,
                "seconds": spread(found[name]),
                "ratio": ratios(found[name], found["Flower"]),
                "models": float(f"{side.models_of_memory():.3g}"),
            }
        )
    return rows


def _strategies(every: bool) -> list[tuple[str, Callable[[], Any], bool]]:
    """Return name, strategy, and whether it takes canned replies; fewer for the large model."""
    same = {"seed": 1, "fraction_evaluate": 0.0}
    found: list[tuple[str, Callable[[], Any], bool]] = [
        ("FedAvg", partial(fr.FedAvg, **same), True)
    ]
    if every:
        terms = [fr.SparseTernary(density_up=DENSITY)]
        found += [
            ("FedAvg, bfloat16", partial(fr.FedAvg, wire_dtype="bfloat16", **same), True),
            ("FedAvg, ternary code", partial(fr.RegStrategy, terms, **same), False),
            (
                "CoordinateMedian",
                partial(fr.FedAvg, aggregator=fr.CoordinateMedian(), **same),
                True,
            ),
            ("Krum", partial(fr.FedAvg, aggregator=fr.Krum(byzantine=1), **same), True),
        ]
    return found


def canned(model: nn.Module, number: int) -> fr.RegClientApp:
    """Return an app whose clients reply with fixed arrays near the model."""
    state = {n: v.numpy() for n, v in model.state_dict().items()}
    replies = []
    for pid in range(number):
        rng = np.random.default_rng(pid)
        moved = {n: a + 0.01 * rng.standard_normal(a.shape, np.float32) for n, a in state.items()}
        replies.append({n: Array(a.astype(np.float32)) for n, a in moved.items()})
    made = fr.RegClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        mine = replies[int(context.node_config["partition-id"])]
        metrics = MetricRecord({"num-examples": 100})
        content = {"arrays": ArrayRecord(dict(mine)), "metrics": metrics}
        return Message(RecordDict(dict(content)), reply_to=message)

    return made


def _own(build: Callable[[], Any], model: nn.Module) -> Any:
    """Return the package's clients of a strategy, with one example each."""
    width = next(p.shape[1] for p in model.parameters() if p.ndim == 2)
    classes = [type(t) for t in build().term.terms]

    def client_fn(context: Context) -> Any:
        pid = int(context.node_config["partition-id"])
        x, _ = jobs.examples(1, width, seed=pid)
        data = [(x, torch.zeros(1, dtype=torch.int64))]
        return fr.RegClient(jobs.copied(model), data, device="cpu", terms=classes)

    return fr.client_app(client_fn)


def _peak(call: Callable[[], Any]) -> int:
    """Return the peak of Python's and numpy's memory during a call, beyond what was there before."""
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _bytes(model: nn.Module) -> int:
    return sum(v.numel() * v.element_size() for v in model.state_dict().values())
