"""Clients a second on the small job: plain loops, ours one by one, stacked, and in two processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

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
)

PLAIN = {
    "bare loop, DataLoader": jobs.bare_loader,
    "bare loop, tensors indexed": jobs.bare_indexed,
    "bare torch.func.vmap": jobs.bare_vmap,
}
BASE = "bare loop, DataLoader"


def measure(effort: Effort) -> list[Row]:
    """Return a row for each number of threads, method and grid."""
    rows: list[Row] = []
    number = 4 if effort.quick else jobs.CLIENTS
    for threads_ in thread_counts(effort):
        say(f"clients: {number} of the small job, threads: {threads_}")
        with threads(threads_):
            sides: dict[tuple[str, str], Callable[[], float]] = {
                (name, ""): partial(loop, number) for name, loop in PLAIN.items()
            }
            grids = []
            for method, how, grid in _grids(number, threads_ > 1 or effort.quick):
                grids.append(grid)
                sides[method, how] = jobs.side(method, grid)
            try:
                named = {" | ".join(side): call for side, call in sides.items()}
                found = interleaved(named, effort, "clients")
            finally:
                for grid in grids:
                    jobs.closed(grid)
        base = found[f"{BASE} | "]
        for name, seconds in found.items():
            side, how = name.split(" | ")
            rows.append(
                {
                    "side": side,
                    "grid": how,
                    "threads": threads_,
                    "clients": number,
                    "seconds": spread(seconds),
                    "per-second": spread([number / s for s in seconds]),
                    "ratio": ratios(seconds, base),
                    "overhead-ms": spread(
                        [1000 * (s - b) / number for s, b in zip(seconds, base, strict=True)]
                    ),
                }
            )
    return rows


def _grids(number: int, few: bool) -> list[tuple[str, str, Any]]:
    """Return method, kind of grid, and grid: what this version of the package has."""
    methods = [m for m in jobs.METHODS if not few or m in ("FedAvg", "FedProx")]
    found: list[tuple[str, str, Any]] = [
        (m, "InProcessGrid", fr.InProcessGrid(jobs.app(m), number)) for m in methods
    ]
    stacked = getattr(fr, "StackedGrid", None)
    if stacked is not None:
        found += [(m, "StackedGrid", stacked(jobs.app(m), number)) for m in methods]
    if "workers" in inspect.signature(fr.InProcessGrid).parameters:
        make: Any = fr.InProcessGrid
        pool = make(jobs.app("FedAvg"), number, workers=2)
        found.append(("FedAvg", "InProcessGrid, workers=2", pool))
    return found
