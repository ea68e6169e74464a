"""Growth: seconds of a round against the cohort, the parameters and the population."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

import flwr_regs as fr
from benchmarks.speed import jobs
from benchmarks.speed.timing import Effort, Row, say, spread, threads

COHORTS = (10, 100, 1000)
PARAMETERS = (10_000, 100_000, 1_000_000, 10_000_000, 20_000_000)
POPULATIONS = (1_000, 10_000, 100_000)
COHORT = 1_000
"""The cohort that is drawn from each population."""
ROUNDS = 3
"""Rounds after the first."""


def measure(effort: Effort) -> list[Row]:
    """Return a row for each kind of growth, grid and size: FedAvg, one step of 32 examples a client."""
    kinds = {"InProcessGrid": fr.InProcessGrid, "StackedGrid": getattr(fr, "StackedGrid", None)}
    rows = []
    cohorts, sizes = COHORTS, PARAMETERS
    populations, cohort = POPULATIONS, COHORT
    if effort.quick:
        cohorts, sizes, populations, cohort = (2, 4), (100, 500), (10, 20), 4
    with threads(1):
        for name, kind in kinds.items():
            if kind is None:
                continue
            for number in cohorts:
                rows.append(_row("cohort", name, kind, number, number, number, jobs.small()))
            for size in sizes:
                rows.append(_row("parameters", name, kind, size, 10, 10, jobs.wide(size)))
            for number in populations:
                rows.append(_row("population", name, kind, number, number, cohort, jobs.small()))
    return rows


def _row(
    what: str,
    grid: str,
    kind: Callable[..., Any],
    size: int,
    population: int,
    cohort: int,
    model: nn.Module,
) -> Row:
    """Train rounds with a model; return their seconds, the first round's apart."""
    width = next(p.shape[1] for p in model.parameters())
    data = [jobs.examples(32, width)]
    app = fr.client_app(partial(_client, model, data))
    strategy = fr.FedAvg(seed=1, fraction_train=cohort / population, fraction_evaluate=0.0)
    made = kind(app, population)
    first, *seconds = jobs.rounds(strategy, made, model, 1 + ROUNDS, jobs.train_config(1))
    jobs.closed(made)
    say(f"growth: {what} {size:,}, {grid}: {min(seconds):.3g} s a round")
    gc.collect()
    return {
        "what": what,
        "grid": grid,
        "size": jobs.count(model) if what == "parameters" else size,
        "clients": cohort,
        "first": float(f"{first:.4g}"),
        "seconds": spread(seconds),
    }


def _client(model: nn.Module, data: list[Any], _: Any) -> Any:
    return fr.FedAvgClient(jobs.copied(model), data, device="cpu")
