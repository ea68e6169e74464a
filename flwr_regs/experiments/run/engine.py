"""Runs: one after the other in this process, several at a time, in Ray, or on a grid that is there.

A run is written while it trains, and does not train again when it is asked for in the same folder.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_regs import InProcessGrid, StackedGrid, client_app
from flwr_regs.experiments.calls import REFERENCES
from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.extras import missing_extra
from flwr_regs.experiments.partition.client_data import client_data_of, left
from flwr_regs.experiments.report.run_records import RunRecord, recorded
from flwr_regs.experiments.run.clients import RunClients, client_of
from flwr_regs.experiments.run.costs import announcement
from flwr_regs.experiments.run.process_family import WorkerKilled, adopt, end_descendants
from flwr_regs.experiments.run.process_state import quiet, threads, warm_up
from flwr_regs.experiments.run.progress import Progress
from flwr_regs.experiments.run.references import References
from flwr_regs.experiments.run.trainer import Trainer, begun
from flwr_regs.experiments.user_code import staying
from flwr_regs.wire.worker_pool import Ended, News, WorkerPool, tell


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
    known = recorded(runs, folder) if folder else {}
    ended = {key: record for key, record in known.items() if record.ended}
    lacking = [run for run in runs if run.key not in ended]
    if lacking and not progress.quiet:
        settings = lacking[0].settings
        if said := left(settings, client_data_of(settings)):
            progress.say(f"data: {said}")
        announcement(lacking, workers, progress, begun(lacking, folder) if folder else {})
        if runner == "ray":
            progress.say("Ray starts for each seed; that may take a minute, which is not counted")
        elif grid is not None:
            progress.say("that is of clients one after another, on a machine like this one")
        elif runner == "stacked":
            progress.say("that is of clients one after another; in a stack they take less")
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
    with quiet() as warned, threads(1) as allowed, torch.inference_mode(False), torch.enable_grad():
        warm_up()
        clients, stacked = RunClients(run, client_data_of(run.settings)), runner == "stacked"
        kind = References if run.calls[0].target in REFERENCES else Trainer
        trainer = kind(clients, folder, progress, allowed)
        trainer.record.runner = runner
        if not stacked:  # in a stack all begin at once
            clients.told = trainer.client_begins
        here = grid is None or kind is References
        grid = grid or (StackedGrid if stacked else InProcessGrid)(clients)
        with trainer.heartbeat:
            return trainer.train(grid, here, warned)


class Workers(WorkerPool):
    """Processes that each do a job at a time. With them ends what they have started, such as Ray."""

    def close(self) -> None:
        for process in self.running.values():
            if process.pid is not None:
                end_descendants(process.pid)
        super().close()


_KEPT: dict[int, Workers] = {}
"""The workers that stay, by their number."""


def _in_processes(
    jobs: Sequence[Callable[[], Any]], progress: Progress, workers: int, keep: bool
) -> Iterator[Any]:
    """Do the jobs in processes of their own, some at a time, and yield what they return."""
    pool = _KEPT.pop(workers, None) or Workers(_worker, None, workers, "nothing", "")
    with closing(pool.answers(jobs, lanes=range(len(jobs)))) as answers:
        for _, answer in answers:
            if isinstance(answer, News):
                news, *told = answer.told
                getattr(progress, news)(*told)
            elif isinstance(answer, Ended):
                fewer = "; fewer of them need less" * (workers > 1)
                raise WorkerKilled(f"a worker {answer}, perhaps for want of memory{fewer}")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                yield answer
    if keep:
        _KEPT[workers] = pool
    else:
        pool.close()


def _worker(_: None) -> Callable[[Callable[[], Any]], Any]:
    """Prepare one of some workers; return what does a job."""
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def done(job: Callable[[], Any]) -> Any:
        try:
            with staying():
                return job()
        except BaseException as error:  # the parent raises it
            return error

    return done


def _end_with_parent() -> None:
    """End this process when its parent is gone: whoever resumes must be the only one to write."""
    if parent := multiprocessing.parent_process():
        parent.join()
        end_descendants(os.getpid())
        os._exit(1)


class _ToParent(Progress):
    """Passes a worker's news on."""

    def round(self, *told: Any) -> None:
        tell(("round", *told))

    def within(self, *told: Any) -> None:
        tell(("within", *told))


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
