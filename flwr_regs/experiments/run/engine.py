"""Runs of a plan: one after the other in this process, several at a time, or in Flower's Ray simulation.

A run is written while it trains and does not run again when its plan is resumed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.report.results import Results, write
from flwr_regs.experiments.report.run_records import Run
from flwr_regs.experiments.run.comparison import Comparison, OnRound
from flwr_regs.experiments.run.progress import Progress
from flwr_regs.experiments.settings.job import Job

PLAN = "settings.json"


@dataclass(frozen=True)
class Plan:
    """What is to run.

    Attributes
    ----------
    jobs : list of (str, Job)
        The label and the job of each run: one method, one seed.
    heading : str
        What the labels are.
    ordered : bool
        Whether the labels are the values of an ordered parameter.
    more : dict
        What a command keeps beside.
    """

    jobs: Sequence[tuple[str, Job]]
    heading: str = "method"
    ordered: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return list(dict.fromkeys(job.seed for _, job in self.jobs))

    @classmethod
    def fair(
        cls, jobs: Sequence[tuple[str, Job]], heading: str = "method", ordered: bool = False
    ) -> Plan:
        """Return a plan in which the clients test every run if they must test one: rows compare so.

        Raises ValueError if another run cannot be tested there.
        """
        if any(job.tested_on_clients for _, job in jobs):
            jobs = [
                (label, Job.from_run_config({**job.config, "test-on-clients": True}))
                for label, job in jobs
            ]
        return cls(jobs, heading, ordered)

    def check(self) -> None:
        """Raise ValueError or OSError for what can be known to be impossible before anything trains."""
        keys = [(label, job.seed) for label, job in self.jobs]
        if len({*keys}) < len(keys):
            twice = next(k for k in keys if keys.count(k) > 1)
            raise ValueError(f"'{twice[0]}' with seed {twice[1]} stands here twice: name each once")
        for job in {job: None for _, job in self.jobs}:
            job.check_data()

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the plan, with the hash of each run's partition, and what produces it."""
        runs = [
            {"label": label, "settings": job.config, "partition": client_data_of(job).hash}
            for label, job in self.jobs
        ]
        plan = {"heading": self.heading, "ordered": self.ordered, "seeds": self.seeds, **self.more}
        write(folder / PLAN, json.dumps({**provenance, **plan, "runs": runs}, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Return the plan of a results' folder.

        Raises ValueError, with the reason, if there is none or it cannot be read.
        """
        path = folder / PLAN
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            jobs = [(r["label"], Job.from_run_config(r["settings"])) for r in kept.pop("runs")]
            if not jobs:
                raise ValueError("it has no runs")
            return cls(jobs, kept.pop("heading"), kept.pop("ordered"), kept)
        except FileNotFoundError as error:
            raise ValueError(f"{folder} holds no results: it has no {PLAN}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            raise ValueError(f"{path} is damaged, or of another version: {kind}{error}") from error

    def recorded(self, folder: Path) -> list[Run]:
        """Return the plan's runs that have trained at all, as far as they got, in its order."""
        paths = [records.record_path(folder, label, job.seed) for label, job in self.jobs]
        return [run for path in paths if path.is_file() and (run := records.read(path))]

    def missing(self, folder: Path) -> list[tuple[str, Job]]:
        """Return the runs that have not ended."""
        done = {(run.label, run.seed) for run in self.recorded(folder) if run.ended}
        return [(label, job) for label, job in self.jobs if (label, job.seed) not in done]

    def results(self, folder: Path, notes: Sequence[str] = (), baseline: bool = False) -> Results:
        """Return the results so far, compared with the first row if asked; ValueError without any."""
        if not (runs := self.recorded(folder)):
            raise ValueError(f"{folder} has no runs yet")
        first = runs[0].label if baseline else ""
        return Results(runs, notes, self.heading, self.ordered, first)

    def model_name(self, label: str, job: Job) -> str:
        """Return the name of a run's model file."""
        return label if len(self.seeds) == 1 else f"{label}-seed{job.seed}"


def execute(
    plan: Plan, folder: Path | None, progress: Progress, workers: int = 1, stacked: bool = False
) -> list[Run]:
    """Train what the plan lacks in `folder`, and return all its runs.

    Whatever ends a run early, the others have their turn; the run says why. Tables are written after each
    run. KeyboardInterrupt and SystemExit end everything at once; all rounds are on the disk by then.

    Parameters
    ----------
    plan : Plan
    folder : Path or None
        None: nothing is written, and nothing is taken up.
    progress : Progress
    workers : int
        Processes that train at a time; with 1 it is this one.
    stacked : bool
        Whether a cohort's clients train in one set of kernels.
    """
    known = plan.recorded(folder) if folder else []
    runs = {(run.label, run.seed): run for run in known if run.ended}
    keys = [(label, job.seed) for label, job in plan.jobs]
    missing = [one for one, key in zip(plan.jobs, keys, strict=True) if key not in runs]
    trained: Iterator[Run]
    if workers > 1:
        trained = _in_workers(plan, missing, folder, progress, workers, stacked)
    else:
        trained = (train(plan, *one, folder, progress.round, stacked) for one in missing)
    with progress:
        for run in trained:
            runs[run.label, run.seed] = run
            progress.ended(run.label, run.seed, run.stopped)
            if folder:
                done = [runs[key] for key in keys if key in runs]
                Results(done, (), plan.heading, plan.ordered).save_tables(folder)
    return [runs[key] for key in keys]


def train(
    plan: Plan, label: str, job: Job, folder: Path | None, told: Any, stacked: bool = False
) -> Run:
    """Train one run in this process; an error ends the run, and the run says why."""
    from flwr_regs import InProcessGrid, StackedGrid
    from flwr_regs.experiments.run.clients import app

    grid = StackedGrid if stacked else InProcessGrid

    def on_round(run: Run) -> None:
        told(label, job.seed, run.test[-1]["round"], run.test[-1]["accuracy"])

    with quiet() as warned, one_thread():
        _warm_up()
        comparison = Comparison(job, grid(app, job.num_clients, job.config))
        (method,) = job.method_names
        model, checkpoints = plan.model_name(label, job), None
        if folder is not None and job.checkpoint_every:
            checkpoints = folder / "checkpoints" / f"{records.file_name(label)}-seed{job.seed}"
        try:
            return comparison.train(
                *(method, label, model, folder, on_round, time.process_time, warned, checkpoints)
            )
        except Exception:
            return comparison.last


def try_out(job: Job, on_round: OnRound = lambda run: None) -> dict[str, Any]:
    """Train two rounds of the job's first method, no client slow; return the second one's entry.

    The first round tells less: some methods take it easy there. Raises RuntimeError if the run would fail.
    """
    from flwr_regs import InProcessGrid
    from flwr_regs.experiments.run.clients import app

    short = replace(job, rounds=2, cohorts="uniform", straggler_share=0.0, drop_out=0.0)
    with quiet(), one_thread():
        comparison = Comparison(short, InProcessGrid(app, short.num_clients, short.config))
        try:
            comparison.train(job.method_names[0], on_round=on_round)
        except Exception as error:
            raise RuntimeError(f"{job.method_names[0]}: {comparison.last.error}") from error
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
    plan: Plan,
    jobs: Sequence[tuple[str, Job]],
    folder: Path | None,
    progress: Progress,
    workers: int,
    stacked: bool,
) -> Iterator[Run]:
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker, initargs=(queue,))
    try:
        waiting: set[Future[Run]] = {
            pool.submit(_work, plan, label, job, folder, stacked) for label, job in jobs
        }
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


def _work(plan: Plan, label: str, job: Job, folder: Path | None, stacked: bool) -> Run:
    return train(plan, label, job, folder, lambda *news: _QUEUE.put(news), stacked)


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
