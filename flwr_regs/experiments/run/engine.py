"""Runs: one after the other in this process, or several at a time.

A run is written while it trains, and does not train again when it is asked for in the same folder.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.run.comparison import Comparison, OnRound
from flwr_regs.experiments.run.progress import Progress


def execute(
    runs: Sequence[Run],
    folder: Path | None,
    progress: Progress,
    workers: int = 1,
    stacked: bool = False,
    tables: Callable[[list[RunRecord]], None] = lambda _: None,
) -> list[RunRecord]:
    """Train what is missing of some runs in `folder`, and return the records of all.

    Whatever ends a run early, the others have their turn; the run says why. KeyboardInterrupt and SystemExit
    end everything at once; all rounds are on the disk by then.

    Parameters
    ----------
    runs : sequence of Run
    folder : Path or None
        None: nothing is written, and nothing is taken up.
    progress : Progress
    workers : int
        Processes that train at a time; with 1 it is this one.
    stacked : bool
        Whether a cohort's clients train in one set of kernels.
    tables : callable
        Called with the records so far after each run.
    """
    known = records.recorded(runs, folder) if folder else []
    ended = {(record.label, record.seed): record for record in known if record.ended}
    lacking = [run for run in runs if (run.label, run.seed) not in ended]
    trained: Iterator[RunRecord]
    if workers > 1:
        trained = _in_workers(lacking, folder, progress, workers, stacked)
    else:
        trained = (train(run, folder, progress.round, stacked) for run in lacking)
    keys = [(run.label, run.seed) for run in runs]
    with progress:
        for record in trained:
            ended[record.label, record.seed] = record
            progress.ended(record.label, record.seed, record.stopped)
            tables([ended[key] for key in keys if key in ended])
    return [ended[key] for key in keys]


def train(run: Run, folder: Path | None, told: Any, stacked: bool = False) -> RunRecord:
    """Train one run in this process; an error ends the run, and its record says why."""
    from flwr_regs import InProcessGrid, StackedGrid
    from flwr_regs.experiments.run.clients import app

    grid = StackedGrid if stacked else InProcessGrid

    def on_round(record: RunRecord) -> None:
        told(run.label, run.seed, record.test[-1]["round"], record.test[-1]["accuracy"])

    settings, checkpoints = run.settings, None
    with quiet() as warned, one_thread():
        _warm_up()
        comparison = Comparison(settings, grid(app, settings.num_clients, settings.config))
        if folder is not None and settings.checkpoint_every:
            name = records.record_path(folder, run.label, run.seed).stem
            checkpoints = folder / "checkpoints" / name
        try:
            return comparison.train(run, folder, on_round, time.process_time, warned, checkpoints)
        except Exception:
            return comparison.last


def try_out(run: Run, on_round: OnRound = lambda run: None) -> dict[str, Any]:
    """Train two rounds of a run, no client slow; return the second one's entry.

    The first round tells less: some methods take it easy there. Raises RuntimeError if the run would fail.
    """
    from flwr_regs import InProcessGrid
    from flwr_regs.experiments.run.clients import app

    short = replace(run.settings, rounds=2, cohorts="uniform", straggler_share=0.0, drop_out=0.0)
    with quiet(), one_thread():
        comparison = Comparison(short, InProcessGrid(app, short.num_clients, short.config))
        try:
            comparison.train(replace(run, settings=short), on_round=on_round)
        except Exception as error:
            raise RuntimeError(f"{run.method}: {comparison.last.error}") from error
    return comparison.last.rounds[-1]


@lru_cache(maxsize=1)
def _warm_up() -> None:
    """Train a moment: what torch loads at its first step must not count as the first method's time."""
    import torch

    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3), torch.nn.Flatten(), torch.nn.Linear(1, 2))
    loss = torch.nn.functional.cross_entropy(model(torch.zeros(2, 1, 3, 3)), torch.tensor([0, 1]))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), 0.1).step()


def _in_workers(
    runs: Sequence[Run],
    folder: Path | None,
    progress: Progress,
    workers: int,
    stacked: bool,
) -> Iterator[RunRecord]:
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker, initargs=(queue,))
    try:
        waiting: set[Future[RunRecord]] = {pool.submit(_work, run, folder, stacked) for run in runs}
        while waiting:
            done, waiting = wait(waiting, timeout=0.2)
            while not queue.empty():
                progress.round(*queue.get())
            for future in sorted(done, key=lambda f: f.exception() is not None):  # results first
                yield future.result()
    except BrokenProcessPool as error:
        again = f"; go on with --resume {folder} and fewer --workers" if folder else ""
        raise RuntimeError(
            f"a worker process was killed, perhaps for want of memory{again}"
        ) from error
    except BaseException:
        for process in [*(pool._processes or {}).values()]:  # its own, and no other child of ours
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_QUEUE: Any = None


def _begin_worker(queue: Any) -> None:
    """Prepare a worker: Ctrl-C is the parent's to handle, and a pool that breaks ends it at once."""
    global _QUEUE
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    _QUEUE = queue
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent is gone: whoever resumes must be the only one to write."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(run: Run, folder: Path | None, stacked: bool) -> RunRecord:
    return train(run, folder, lambda *news: _QUEUE.put(news), stacked)


class _Collector(logging.Handler):
    """Keeps warnings, each once; the server's list of failed clients is in the history."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith("\t>") and len(self.said) < 5:
            self.said[text] = None


@contextmanager
def quiet() -> Iterator[Collection[str]]:
    """Keep the log from the screen; return its warnings, which the table repeats."""
    log, collector = logging.getLogger("flwr"), _Collector()
    before, log.handlers = log.handlers, [collector]
    try:
        with warnings.catch_warnings():
            # torch.func asks users to file an issue with torch, for each layer that it does not stack
            warnings.filterwarnings("ignore", "There is a performance drop because")
            yield collector.said
    finally:
        log.handlers = before


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: small models train faster, and any number of workers gives equal bits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
