"""Runs: one after the other in this process, several at a time, in Ray, or on a grid that is there.

A run is written while it trains, and does not train again when it is asked for in the same folder.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_regs import InProcessGrid, StackedGrid, client_app
from flwr_regs.experiments.calls import REFERENCES
from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.extras import missing_extra
from flwr_regs.experiments.partition.client_data import client_data_of, left
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.run.clients import RunClients, client_of
from flwr_regs.experiments.run.costs import announcement
from flwr_regs.experiments.run.process_family import WorkerKilled, adopt, end_descendants
from flwr_regs.experiments.run.process_state import quiet, threads, warm_up
from flwr_regs.experiments.run.progress import Progress
from flwr_regs.experiments.run.references import References
from flwr_regs.experiments.run.trainer import Trainer, begun
from flwr_regs.experiments.user_code import staying


def execute(
    runs: Sequence[Run],
    folder: Path | None,
    progress: Progress,
    workers: int = 1,
    runner: str = "process",
    tables: Callable[[Sequence[RunRecord]], None] = lambda records: None,
    grid: Grid | None = None,
    gpus: float = 0.0,
    keep: bool = False,
) -> list[RunRecord]:
    """Train what is missing of some runs in `folder`, and return the records of all.

    Whatever ends a run early, the others have their turn; the record says why. KeyboardInterrupt and
    SystemExit end everything at once, and so does a disk that is full; all rounds are on the disk by then.

    Parameters
    ----------
    runs : sequence of Run
    folder : Path or None
        None: nothing is written, and nothing is taken up.
    progress : Progress
        Told the cost before the first round, unless it is quiet.
    workers : int
        Processes that train at a time; with 1 it is this one.
    runner : str
        ``"process"``; ``"stacked"``: all clients of a round train at once (vmap); or ``"ray"``: in
        Flower's simulation, where a seed's labels must be its methods. It needs a folder.
    tables : callable
        Called with the records so far after each run; in Ray, after each seed.
    grid : Grid, optional
        Where the clients are, if they are not in this process.
    gpus : float
        Each client's share of a GPU, in Ray.
    keep : bool
        Whether the workers stay for the next call, until this process ends: each takes seconds to start.

    Raises
    ------
    ImportError
        Ray is not installed.
    RuntimeError
        A process that trains was killed.
    """
    known = records.recorded(runs, folder) if folder else {}
    ended = {key: record for key, record in known.items() if record.ended}
    lacking = [run for run in runs if run.key not in ended]
    if lacking and not progress.quiet:
        settings = lacking[0].settings
        if said := left(settings, client_data_of(settings)):
            progress.say(f"data: {said}")
        if grid is None:
            announcement(lacking, workers, progress, begun(lacking, folder) if folder else {})
        if runner == "ray":
            progress.say("Ray starts for each seed; that may take a minute, which is not counted")
    trained: Iterable[RunRecord]
    if runner == "ray":
        assert folder is not None  # for its log
        if find_spec("ray") is None:
            raise missing_extra("ray", "Flower's simulation", "ray")
        seeds = dict.fromkeys(run.seed for run in lacking)
        of_seeds = ([run for run in lacking if run.seed == seed] for seed in seeds)
        rays = [partial(_in_ray, several, folder, gpus) for several in of_seeds]
        trained = chain.from_iterable(_in_processes(rays, progress, 1, False))
    elif workers > 1:
        jobs = [partial(train, run, folder, _ToParent(), runner) for run in lacking]
        trained = _in_processes(jobs, progress, workers, keep)
    else:
        trained = (train(run, folder, progress, runner, grid) for run in lacking)
    with progress.screen:
        for record in trained:
            ended[record.label, record.seed] = record
            progress.ended(record.label, record.seed, record.stopped)
            tables([ended[run.key] for run in runs if run.key in ended])
    return [ended[run.key] for run in runs]


def train(
    run: Run, folder: Path | None, progress: Progress, runner: str, grid: Grid | None = None
) -> RunRecord:
    """Train one run in this process; an error ends the run, and its record says why."""
    with quiet() as warned, threads(1) as allowed:
        warm_up()
        clients, stacked = RunClients(run, client_data_of(run.settings)), runner == "stacked"
        kind = References if run.calls[0].target in REFERENCES else Trainer
        trainer = kind(clients, folder, progress, allowed)
        trainer.record.runner = runner
        if not stacked:  # in a stack all begin at once
            clients.told = trainer.client_begins
        here = grid is None or kind is References
        grid = _grid(clients, stacked) if grid is None else grid
        with trainer.heartbeat:
            record = trainer.train(grid, here, warned)
        if record.ended and getattr(grid, "fallbacks", None) == {}:
            _CHECKED.add(_kind(run))
        return record


def _grid(clients: RunClients, stacked: bool) -> Grid:
    """Return the grid of a run. A process compares each method's stack with clients alone once."""
    if not stacked:
        return InProcessGrid(clients)
    check: Literal["first", False] = False if _kind(clients.run) in _CHECKED else "first"
    return StackedGrid(clients, check=check)


def _kind(run: Run) -> tuple[Any, ...]:
    """Return what decides whether a run's stacks give the results of clients alone."""
    settings = run.settings
    targets = (*(call.target for call in run.calls), settings.optimizer)
    return settings.dataset, settings.model, settings.test_on_clients, *targets


_CHECKED: set[tuple[Any, ...]] = set()
"""The kinds of runs whose clients have all been stacked, and compared, in this process."""


_KEPT: dict[int, tuple[ProcessPoolExecutor, Any]] = {}
"""The workers that stay, by their number, and the queue of their news."""


def _in_processes(
    jobs: Sequence[Callable[[], Any]], progress: Progress, workers: int, keep: bool
) -> Iterator[Any]:
    """Do the jobs in processes of their own, some at a time, and yield what they return."""
    context = multiprocessing.get_context("spawn")
    if (kept := _KEPT.pop(workers, None)) is None:
        queue = context.SimpleQueue()
        pool = ProcessPoolExecutor(workers, context, _begin_worker, (queue, workers))
    else:
        pool, queue = kept
    try:
        # as the workers begin, which start here
        with nullcontext() if os.name == "nt" else _ctrl_c_blocked():
            waiting: set[Future[Any]] = {pool.submit(_done, job) for job in jobs}
        while waiting:
            done, waiting = wait(waiting, timeout=0.2)
            while not queue.empty():
                news, told = queue.get()
                getattr(progress, news)(*told)
            for future in sorted(done, key=lambda f: f.exception() is not None):  # results first
                yield future.result()
    except BrokenProcessPool as error:
        processes = [*(pool._processes or {}).values()]
        pool.shutdown()  # that waits for their ends
        if any(process.exitcode == 1 for process in processes):
            raise RuntimeError(
                "a worker has ended by itself; in a script, start the training under "
                "`if __name__ == '__main__':`, because each worker imports the script"
            ) from error
        fewer = "; fewer of them need less" * (workers > 1)
        raise WorkerKilled(f"a worker was killed, perhaps for want of memory{fewer}") from error
    except BaseException:
        for process in [*(pool._processes or {}).values()]:  # its own, and no other child of ours
            if process.pid is not None:
                end_descendants(process.pid)
            process.kill()
        raise
    else:
        if keep:
            _KEPT[workers] = pool, queue
    finally:
        if workers not in _KEPT:
            pool.shutdown(wait=True, cancel_futures=True)


def _done(job: Callable[[], Any]) -> Any:
    """Do a job in a worker, and return what it returns."""
    with staying():
        return job()


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Hold Ctrl-C back; a process that starts meanwhile does not get it either."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_QUEUE: Any = None


def _begin_worker(queue: Any, workers: int) -> None:
    """Prepare one of some workers, which share the cores.

    Ctrl-C is the parent's to handle, and a pool that breaks ends it at once.
    """
    global _QUEUE
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    _QUEUE = queue
    torch.set_num_threads(max(torch.get_num_threads() // workers, 1))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent is gone: whoever resumes must be the only one to write."""
    if parent := multiprocessing.parent_process():
        parent.join()
        end_descendants(os.getpid())
        os._exit(1)


class _ToParent(Progress):
    """Passes a worker's news on."""

    def round(self, *told: Any) -> None:
        _QUEUE.put(("round", told))

    def within(self, *told: Any) -> None:
        _QUEUE.put(("within", told))


def _in_ray(runs: Sequence[Run], folder: Path, gpus: float) -> list[RunRecord]:
    """Train the runs of one seed in one simulation, in this process: whatever ends it, Ray ends too.

    What Flower and Ray print, and this process, goes to a file; `gpus` is each client's share.
    """
    from flwr.simulation import run_simulation

    adopt()
    with (folder / "flower.log").open("a") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    clients = runs[0].settings.num_clients
    app = client_app(partial(client_of, tuple(runs)), once=False)
    trained, server = list[RunRecord](), ServerApp()

    @server.main()
    def main(grid: Grid, _: Context) -> None:
        while len([*grid.get_node_ids()]) < clients:  # they register while the server starts
            time.sleep(0.05)
        trained.extend(train(run, folder, _ToParent(), "ray", grid) for run in runs)

    resources: Any = {"num_cpus": 1, "num_gpus": gpus}
    run_simulation(server, app, clients, backend_config={"client_resources": resources})
    return trained
