"""Clients a second on a CUDA GPU: one by one, in stacks, compiled, and in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flwr_regs as fr
from benchmarks.speed import jobs
from benchmarks.speed.timing import Effort, Row, interleaved, ratios, spread

WAYS: dict[str, dict[str, Any]] = {
    "StackedGrid": {},
    "StackedGrid, compile=True": {"compile": True},
    "StackedGrid, bfloat16": {"precision": "bfloat16"},
    "StackedGrid, bfloat16, compile=True": {"precision": "bfloat16", "compile": True},
}
MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "MLP 64-64-10": (jobs.small, (64,)),
    "CNN of McMahan et al.": (jobs.convolutions, (1, 28, 28)),
}
ONE_BY_ONE = "InProcessGrid"


def measure(effort: Effort) -> list[Row]:
    """Return a row for each model, method and grid; one that says why where there is no GPU."""
    if not torch.cuda.is_available():
        return [{"side": "a GPU", "skipped": "torch finds no CUDA GPU here"}]
    number = 4 if effort.quick else jobs.CLIENTS
    rows: list[Row] = []
    for model, (make, shape) in MODELS.items():
        sets = [jobs.examples(jobs.BATCH * jobs.STEPS, *shape, seed=k) for k in range(number)]
        data = fr.Clients(make, sets, batch_size=jobs.BATCH, device="cuda")
        for method in ("FedAvg", "FedProx", "SCAFFOLD"):
            grids: dict[str, Any] = {ONE_BY_ONE: fr.InProcessGrid(data)}
            grids |= {way: fr.StackedGrid(data, memory=2**34, **how) for way, how in WAYS.items()}
            sides = {way: jobs.side(method, grid, model=make) for way, grid in grids.items()}
            found = interleaved(sides, effort, f"gpu, {model}, {method}")
            rows += [
                {
                    "model": model,
                    "side": method,
                    "grid": way,
                    "clients": number,
                    "seconds": spread(seconds),
                    "per-second": spread([number / s for s in seconds]),
                    "ratio": ratios(seconds, found[ONE_BY_ONE]),
                }
                for way, seconds in found.items()
            ]
    return rows
