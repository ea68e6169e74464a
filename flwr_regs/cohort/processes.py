"""Processes that each train a part of a cohort as a stack; arrays go through shared memory. Plain torch.

They are started anew ("spawn"), as torch's threads do not survive a fork, and get the clients once. All
that lasts stays in the process that asks.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from flwr_regs.client.member import Identity
from flwr_regs.cohort.client_sets import ClientSets
from flwr_regs.cohort.member_view import Asked
from flwr_regs.cohort.stack_groups import Served, Settings
from flwr_regs.cohort.stacks import Stacks
from flwr_regs.wire.errors import described

try:
    import cloudpickle as pickler  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    pickler = pickle

SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Part:
    """What one process made of its clients: what came of them, and why others train by themselves."""

    served: dict[int, Served]
    fallbacks: dict[str, int]


class StackProcesses:
    """Some processes that train stacks.

    Parameters
    ----------
    clients : ClientSets
    who : Identity
        The method's.
    settings : Settings
    number : int

    Raises
    ------
    TypeError
        The clients cannot be sent to another process.
    """

    def __init__(self, clients: ClientSets, who: Identity, settings: Settings, number: int) -> None:
        try:
            self._given: bytes = pickler.dumps((clients, who, settings))
        except Exception as error:  # of many kinds
            raise TypeError(
                f"workers={number}: these clients cannot be sent to another process, "
                f"{described(error)}: give them functions that stand in a module, not lambdas, or install "
                "cloudpickle; or use workers=1"
            ) from error
        self._number = number
        self._running: dict[Connection, BaseProcess] = {}
        Finalize(self, _end, (self._running,), exitpriority=10)

    def close(self) -> None:
        """End the processes; the next clients start new ones."""
        _end(self._running)

    def train(self, asked: Sequence[Asked]) -> list[Part]:
        """Return what each process made of its part of the clients.

        Raises RuntimeError if a process ends before it is done.
        """
        try:
            return self._train(asked)
        except BaseException:  # such as Ctrl-C: what the processes are at is of no use
            self.close()
            raise

    def _train(self, asked: Sequence[Asked]) -> list[Part]:
        if not self._running:
            self._start()
        size = -(-len(asked) // self._number)
        parts = [asked[i : i + size] for i in range(0, len(asked), size)]
        workers = list(self._running)[: len(parts)]
        for worker, part in zip(workers, parts, strict=True):
            _send(worker, [(a.pid, a.client.step_budget, a.message, a.memory) for a in part])
        return [_received(worker, self._running[worker]) for worker in workers]

    def _start(self) -> None:
        method = multiprocessing.get_context("spawn")
        threads = max(1, torch.get_num_threads() // self._number)
        for _ in range(self._number):
            connection, theirs = method.Pipe()
            process = method.Process(target=_work, args=(theirs, threads), daemon=True)
            process.start()
            theirs.close()
            self._running[connection] = process
        for connection in self._running:
            connection.send_bytes(self._given)


def _work(connection: Connection, threads: int) -> None:
    """Run in a process of its own: train what comes until the asking process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the asking process too
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # the asking process says it
    torch.set_num_threads(threads)
    clients, who, settings = pickle.loads(connection.recv_bytes())
    clients.join()
    stacks, made = Stacks(settings), {}
    while True:
        try:
            tasks = _read(connection)
        except (EOFError, OSError):
            return
        clients.model.load_state_dict(clients.initial())  # entries that a client lacks are as given
        asked = []
        for pid, budget, message, memory in tasks:
            if pid not in made:
                made[pid] = clients.client(pid, who)
            made[pid].step_budget = budget
            asked.append(Asked(pid, made[pid], message, memory))
        stacks.fallbacks = {}
        served = stacks.train(asked)
        _send(connection, Part(served, stacks.fallbacks))


def _send(connection: Connection, value: Any) -> None:
    """Send a value; its arrays go through a file in memory, which the receiver removes."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [b.raw() for b in buffers]
    sizes, path = [v.nbytes for v in views], ""
    if sum(sizes):
        handle, path = tempfile.mkstemp(
            prefix="flwr-regs-", dir=SHARED if SHARED.is_dir() else None
        )
        with os.fdopen(handle, "wb") as file:
            file.writelines(views)
    connection.send((data, sizes, path))


def _read(connection: Connection) -> Any:
    """Return a value that was sent; its arrays are views of the shared memory."""
    data, sizes, path = connection.recv()
    if not path:
        return pickle.loads(data, buffers=[b"" for _ in sizes])
    with open(path, "r+b") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0))
    os.unlink(path)
    buffers, first = [], 0
    for size in sizes:
        buffers.append(whole[first : first + size])
        first += size
    return pickle.loads(data, buffers=buffers)


def _received(worker: Connection, process: BaseProcess) -> Part:
    try:
        return _read(worker)  # type: ignore[no-any-return]
    except (EOFError, OSError):
        process.join()
        raise RuntimeError(
            f"a process that trains a stack ended with exit code {process.exitcode}; in a script, start "
            "the training under `if __name__ == '__main__':`, because each process imports the script"
        ) from None


def _end(running: dict[Connection, BaseProcess]) -> None:
    """End all processes, whatever they are at."""
    processes = list(running.values())
    for connection in running:
        connection.close()
    running.clear()
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
