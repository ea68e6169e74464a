"""The local step: a method's against plain torch's, on three models, with one thread and two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flwr.app import ConfigRecord
from torch import nn

import flwr_regs as fr
from benchmarks.speed import jobs
from benchmarks.speed.timing import (
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
from flwr_regs.client.local_training import local_round
from flwr_regs.testing import spies

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "MLP 64-64-10": (jobs.small, (64,), 32, 60),
    "MLP 784-2048-2048-10": (partial(jobs.perceptron, 784, 2048, 2048, 10), (784,), 32, 6),
    "CNN of McMahan et al.": (jobs.convolutions, (1, 28, 28), 100, 3),
}
"""Name -> model, shape of an input, examples in a batch, steps that are timed."""
METHODS = ("FedAvg", "FedProx", "FedFOR", "FedADC")


def measure(effort: Effort) -> list[Row]:
    """Return a row for each model, number of threads and method."""
    rows = []
    for threads_, name in [(n, m) for n in thread_counts(effort) for m in MODELS]:
        make, shape, batch, steps = MODELS[name]
        steps = 2 if effort.quick else steps
        if effort.quick and name != "MLP 64-64-10":
            make, shape = (
                partial(jobs.perceptron, 8, 8, 10),
                (8,),
            )  # its rows are named as the models
        say(f"step: {name}, threads: {threads_}")
        data = [jobs.examples(batch, *shape, seed=i) for i in range(steps + 2)]
        with threads(threads_):
            model = make()
            sides = {"bare": partial(_bare, model, data)}
            for method in METHODS:
                sides[method] = partial(_ours, second_round(method, model, data), model, data)
            rows += _rows(interleaved(sides, effort, name), name, batch, threads_, "step")
            if name.startswith("CNN"):
                call = second_round("FedADCPlus", model, data)
                whole = {
                    "bare": partial(_bare_epochs, model, data),
                    "FedADCPlus": partial(_epochs, call, model, data),
                }
                found = interleaved(whole, effort, "FedADC+, two epochs")
                rows += _rows(found, name, batch, threads_, "two epochs")
    return rows


def _rows(
    found: dict[str, list[float]], model: str, batch: int, threads_: int, what: str
) -> list[Row]:
    same = {"model": model, "batch": batch, "threads": threads_, "what": what}
    return [
        {
            **same,
            "side": name,
            "seconds": spread(seconds),
            "ratio": ratios(seconds, found["bare"]),
        }
        for name, seconds in found.items()
    ]


def second_round(method: str, model: nn.Module, data: list[Any]) -> spies.LocalCall:
    """Return a client's second round as the package runs it, when the method has all that it works with."""
    build = jobs.METHODS.get(method) or getattr(fr, method)
    client = getattr(fr, f"{method}Client")
    calls: list[spies.LocalCall] = []
    with spies.recorded(calls):
        app = fr.client_app(lambda _: client(model, data[:1], device="cpu"))
        grid = fr.InProcessGrid(app, 2)  # a round has two clients at least
        config = ConfigRecord({"lr": jobs.LR, "local-steps": 1})
        jobs.rounds(build(seed=1, fraction_evaluate=0.0), grid, model, 2, config)
    return calls[-1]


class Drawn:
    """Batches that note the time whenever one is drawn.

    A hook of the optimiser would note it too, but the package leaves the step to an optimiser with hooks.
    """

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches
        self._stamps: list[float] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self._stamps.append(time.perf_counter())
            yield batch

    def seconds(self) -> float:
        """Return the seconds of a step: from the start of the second to the start of the last."""
        stamps = self._stamps[1 : len(self)]
        return (stamps[-1] - stamps[0]) / (len(stamps) - 1)


def _bare(model: nn.Module, data: list[Any]) -> float:
    drawn = Drawn(data)
    jobs.bare_steps(model, drawn)
    return drawn.seconds()


def _ours(call: spies.LocalCall, model: nn.Module, data: list[Any]) -> float:
    drawn = Drawn(data)
    _round(call, model, drawn, len(data))
    return drawn.seconds()


def _bare_epochs(model: nn.Module, data: list[Any]) -> float:
    return timed(partial(jobs.bare_steps, model, [*data, *data]))


def _epochs(call: spies.LocalCall, model: nn.Module, data: list[Any]) -> float:
    """Return the seconds of two epochs, with all that a round begins and ends with."""
    return timed(partial(_round, call, model, data, 2 * len(data)))


def _round(call: spies.LocalCall, model: nn.Module, data: Any, steps: int) -> None:
    """Run the recorded round again, with so many steps of plain SGD."""
    model.load_state_dict(call.weights)
    settings = {**call.settings, "steps": steps, "epochs": None, "optimizer": None}
    local_round(model, call.term, data, **settings)
