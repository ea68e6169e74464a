"""Clients a second on the small job: bare loops, ours one by one and in stacks, FedJAX's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import flwr_regs as fr
from benchmarks.conformity.environments import CannotRun, default_folder, prepare
from benchmarks.conformity.libraries import LIBRARIES
from benchmarks.speed import jobs, peers
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
    "bare torch.func.vmap, two processes": jobs.bare_vmap_halves,
}
BASE = "bare loop, DataLoader"
POPULATION = 100
"""Times as many clients as take part, in the population of one side."""


def measure(effort: Effort) -> list[Row]:
    """Return a row for each number of threads, method and grid."""
    rows: list[Row] = []
    number = 4 if effort.quick else jobs.CLIENTS
    for threads_ in thread_counts(effort):
        say(f"clients: {number} of the small job, threads: {threads_}")
        with threads(threads_):
            grids = _grids(number, threads_ > 1 or effort.quick)
            sides: dict[tuple[str, str], Callable[[], float]] = {
                (name, ""): partial(loop, number) for name, loop in PLAIN.items()
            }
            for (method, how), grid in grids.items():
                stacked = {"warm": jobs.WARM, "counted": jobs.ROUNDS}  # as many rounds as FedJAX's
                sides[method, how] = jobs.side(
                    method, grid, **(stacked if "Stacked" in how else {})
                )
            sides["FedAvg", "StackedGrid, a tenth of the clients"] = _tenth(number * POPULATION)
            if threads_ == 1 and not effort.quick and (theirs := _fedjax(number)) is not None:
                sides[peers.NAMES["fedjax"], ""] = theirs
            try:
                named = {" | ".join(side): call for side, call in sides.items()}
                found = interleaved(named, effort, "clients")
            finally:
                for grid in grids.values():
                    jobs.closed(grid)
        base = found[f"{BASE} | "]
        fedjax = found.get(f"{peers.NAMES['fedjax']} | ")
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
                    "over-vmap": ratios(found["bare torch.func.vmap | "], seconds),
                    **({"over-fedjax": ratios(fedjax, seconds)} if fedjax else {}),
                    "overhead-ms": spread(
                        [1000 * (s - b) / number for s, b in zip(seconds, base, strict=True)]
                    ),
                }
            )
    return rows


def _grids(number: int, few: bool) -> dict[tuple[str, str], Any]:
    """Return the grid of each method and kind."""
    methods = [m for m in jobs.METHODS if not few or m in ("FedAvg", "FedProx")]
    data = jobs.clients(number)
    grids: dict[tuple[str, str], Any] = {}
    for method in methods:
        grids[method, "InProcessGrid"] = fr.InProcessGrid(data)
        grids[method, "StackedGrid"] = fr.StackedGrid(data, check=False)
        if not few:
            grids[method, "StackedGrid, compile=True"] = fr.StackedGrid(
                data, check=False, compile=True
            )
    grids["FedAvg", "StackedGrid, workers=2"] = fr.StackedGrid(data, check=False, workers=2)
    return grids


def _tenth(number: int) -> Callable[[], float]:
    """Return what trains a tenth of so many clients a round, and returns the seconds of a hundredth."""
    grid = fr.StackedGrid(jobs.clients(number), check=False)
    run = jobs.side("FedAvg", grid, jobs.WARM, jobs.ROUNDS, fraction=0.1)
    return lambda: run() / (POPULATION / 10)


def _fedjax(number: int) -> Callable[[], float] | None:
    """Return what trains FedJAX's FedAvg, and returns the seconds of a round; None if it does not run."""
    try:
        library = LIBRARIES["fedjax"]
        python = prepare("fedjax", library.packages, default_folder())
    except CannotRun as error:
        say(f"clients: no FedJAX: {error}")
        return None
    task = peers.small_task(number, jobs.WARM + jobs.ROUNDS)
    return lambda: median(peers.theirs(library, python, task))
