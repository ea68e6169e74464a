"""Timing: sides that take turns, medians with quartiles, and what machine it was."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flwr_regs.experiments.report.results import processor

ROOT = Path(__file__).parents[2]
PACKAGES = ("flwr", "torch", "numpy", "ray")
ALLOWED = "OMP_NUM_THREADS"
Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How much a measurement may take.

    Attributes
    ----------
    seconds : float
        For each group of sides that take turns; they stop when it is spent.
    least : int
        Turns that each side takes at least.
    quick : bool
        Everything is tiny: it shows that the measurement runs, and no more.
    """

    seconds: float = 15.0
    least: int = 5
    quick: bool = False


LONG = 3
"""Turns end after so many times the seconds that they may take, even if there were fewer than the least."""
QUICK = Effort(seconds=0.0, least=2, quick=True)


def say(text: str) -> None:
    """Print a line of progress at once."""
    print(text, file=sys.stderr, flush=True)


def interleaved(
    sides: Mapping[str, Callable[[], float]], effort: Effort, what: str = ""
) -> dict[str, list[float]]:
    """Let the sides take turns, each in another place of the order each time; return their seconds.

    A side is called once before, which does not count, and returns the seconds that it took.
    """
    for side in sides.values():
        side()
    found: dict[str, list[float]] = {name: [] for name in sides}
    names, began, turn = list(sides), time.monotonic(), 0
    while turn < effort.least or time.monotonic() - began < effort.seconds:
        if effort.seconds and turn >= 2 and time.monotonic() - began > LONG * effort.seconds:
            break  # a slow machine: fewer turns, rather than hours
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            found[name].append(sides[name]())
        turn += 1
        spent = time.monotonic() - began
        left = max(effort.seconds - spent, spent / turn * (effort.least - turn), 0.0)
        if what:
            say(f"  {what}: turn {turn}, {left:.0f} s left")
    return found


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return median and quartiles, and how many values there are."""
    low, median, high = (
        float(f"{v:.{digits}g}") for v in np.quantile(np.asarray(values, float), (0.25, 0.5, 0.75))
    )
    return {"median": median, "low": low, "high": high, "count": len(values)}


def ratios(side: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Return the spread of the ratios of two sides' times, turn by turn."""
    return spread([a / b for a, b in zip(side, base, strict=True)])


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch, and the package's own work on arrays, use so many threads within this block."""
    before, allowed = torch.get_num_threads(), os.environ.get(ALLOWED)
    torch.set_num_threads(count)
    os.environ[ALLOWED] = str(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if allowed is None:
            del os.environ[ALLOWED]
        else:
            os.environ[ALLOWED] = allowed


def thread_counts(effort: Effort) -> tuple[int, ...]:
    """Return the numbers of threads to measure with: one, and two where two cores are free.

    torch's threads wait for each other in busy loops: where others use the cores, a step takes seconds.
    """
    cores = os.cpu_count() or 1
    if effort.quick or cores < 2:
        return (1,)
    if (load := os.getloadavg()[0]) > cores + 1:
        say(f"the load is {load:.1f} on {cores} cores: two threads are not measured")
        return (1,)
    return (1, 2)


def machine() -> dict[str, Any]:
    """Return what the figures depend on: the machine, versions, and the commit."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory-GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "load": round(os.getloadavg()[0], 1),
    }


def resident(pid: int) -> int:
    """Return a process' resident bytes, shared pages divided by their sharers (Linux; else 0)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the last commit that changed the package, and whether it was changed since."""
    found = []
    for words in (["log", "-1", "--format=%h"], ["status", "--porcelain"]):
        command = ["git", *words, "--", "flwr_regs"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found.append(run.stdout.strip())
    return (found[0] or "unknown") + ", changed" * bool(found[1])
