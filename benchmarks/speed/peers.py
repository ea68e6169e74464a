"""Other libraries on the small job, each in an environment of its own; ours in turns with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import flwr_regs as fr
from benchmarks.conformity.environments import CannotRun, default_folder, drive, prepare
from benchmarks.conformity.libraries import LIBRARIES, Library
from benchmarks.conformity.loops.run import Task
from benchmarks.conformity.model import initial
from benchmarks.speed import jobs
from benchmarks.speed.jobs import ROUNDS, WARM
from benchmarks.speed.timing import Effort, Row, say, spread, threads

NAMES = {"fedjax": "FedJAX 0.0.17", "pfl": "pfl-research 0.6.0"}
TURNS = 3
"""Turns of each side."""


def measure(effort: Effort) -> list[Row]:
    """Return a row for each side; one that does not install or run says why."""
    number, turns = (4, 1) if effort.quick else (jobs.CLIENTS, TURNS)
    task = small_task(number, WARM + ROUNDS)
    sides: dict[str, Callable[[], list[float]]] = {}
    rows: list[Row] = []
    for name, words in NAMES.items():
        if effort.quick:  # an installation takes minutes
            rows.append({"side": words, "skipped": "not in a quick run"})
            continue
        say(f"peers: {words} (an installation takes minutes, once)")
        try:
            library = LIBRARIES[name]
            python = prepare(name, library.packages, default_folder())
            sides[words] = partial(theirs, library, python, task)
        except CannotRun as error:
            rows.append({"side": words, "skipped": str(error)})
    for name in ("InProcessGrid", "StackedGrid"):
        if (kind := getattr(fr, name, None)) is not None:
            sides[f"FedAvg, {name}"] = partial(_ours, kind(jobs.clients(number)))
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in list(sides):
            try:
                seconds = sides[name]()
            except CannotRun as error:
                rows.append({"side": name, "skipped": str(error)})
                del sides[name], found[name]
                continue
            found[name] += seconds
            say(f"  peers: turn {turn + 1} of {turns}, {name}: {min(seconds):.3g} s a round")
    rows += [
        {
            "side": name,
            "clients": number,
            "threads": 1,
            "seconds": spread(seconds),
            "per-second": spread([number / s for s in seconds]),
        }
        for name, seconds in found.items()
    ]
    return rows


def small_task(clients: int, rounds: int) -> Task:
    """Return the small job as drivers get it: all clients in each round."""
    data = []
    for k in range(clients):
        x, y = jobs.examples(jobs.BATCH * jobs.STEPS, 64, seed=k)
        data.append((x.double().numpy(), y.numpy()))
    cohorts = (tuple(range(clients)),) * rounds
    start = initial(64, 64, 10, 0)
    return Task(start, tuple(data), cohorts, jobs.LR, 1, jobs.BATCH, 0.0, 0.0)


def theirs(library: Library, python: str, task: Task) -> list[float]:
    """Return the seconds of the rounds of another library."""
    driver = f"{Path(__file__).with_name(f'drive_{library.name}.py')}:drive"
    variables = {
        **library.environment,
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    }
    found = drive(python, driver, task, "FedAvg", variables)
    return [float(m["seconds"]) for m in found["models"][WARM:]]


def _ours(grid: fr.InProcessGrid) -> list[float]:
    with threads(1):
        strategy = jobs.METHODS["FedAvg"](seed=1, fraction_evaluate=0.0)
        return jobs.rounds(strategy, grid, jobs.small(), WARM + ROUNDS)[WARM:]
