"""Arrays block by block: what is made of a large array needs no memory of its size beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

BLOCK = 1 << 15
"""Coordinates of a block: in float64 a few blocks lie in a processor's cache."""
MOST_THREADS = 4
"""More do not help: the processor's cores share the way to its memory."""
WORTH_A_THREAD = 32
"""Jobs for which it pays to start one."""
Job = TypeVar("Job")


def blocks(size: int, width: int = BLOCK) -> Iterator[slice]:
    """Yield the slices of a vector, at most `width` coordinates each, from first to last."""
    for start in range(0, size, width):
        yield slice(start, min(start + width, size))


def spread_over_threads(
    jobs: Sequence[Job], worker: Callable[[], Callable[[Job], None]], most: int = MOST_THREADS
) -> None:
    """Do all jobs in `most` threads at most; `worker` makes what does them, once for each thread.

    NumPy works on blocks without Python's lock. There are no more threads than the environment variable
    OMP_NUM_THREADS allows. What a job does must not depend on the others.
    """
    number = min(most, threads(), len(jobs) // WORTH_A_THREAD)
    left = iter(jobs)

    def work() -> None:
        do = worker()
        for job in left:  # an iterator of a sequence gives each job to one thread
            do(job)

    if number < 2:
        work()
        return
    with ThreadPoolExecutor(number - 1) as pool:
        others = [pool.submit(work) for _ in range(number - 1)]
        work()
        for other in others:
            other.result()


def threads() -> int:
    """Return how many threads jobs are spread over at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    return min(MOST_THREADS, cores or 1, int(allowed) if allowed.isdecimal() else MOST_THREADS)


def order_of(array: np.ndarray) -> Any:
    """Return the order ("C" or "F") in which an array lies in memory; "C" if in neither."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def flat(array: np.ndarray, order: Any = None) -> np.ndarray:
    """Return an array as a vector, in `order` (default: its own): a view, if it lies in that order."""
    return array.reshape(-1, order=order or order_of(array))


def square_sum(array: np.ndarray) -> float:
    """Return the sum of an array's squares, added up in float64."""
    vector, total = flat(array), 0.0
    for part in blocks(vector.size):
        x = vector[part].astype(np.float64)
        total += float(np.dot(x, x))
    return total
