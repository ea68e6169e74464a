"""Processes that work for this one, and those of them that each train a part of a cohort as a stack.

Processes and not threads: what a client draws (shuffling, dropout) comes from torch's generators, which a
process has once. They are started anew ("spawn") and not forked: torch's threads do not survive a fork. So
what they are given is pickled. All that lasts stays in the process that asks. A stack's arrays go through
shared memory. Plain torch.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import Any

from flwr_regs.client.member import Answer, Identity
from flwr_regs.cohort.client_sets import ClientSets, OneClient
from flwr_regs.cohort.member_view import Asked
from flwr_regs.cohort.stack_groups import Settings
from flwr_regs.cohort.stacks import Stacks
from flwr_regs.wire.errors import described

try:
    import cloudpickle as pickler  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    pickler = pickle

SHARED = Path("/dev/shm")
Work = Callable[[Connection, Any], None]
_READY = "ready"


class WorkerPool:
    """Some processes that run ``work(connection, given)``; they end with this object.

    Parameters
    ----------
    work : callable
        A function of a module. It serves its connection until the other end is gone.
    given : object
    number : int
        How many processes there are at most; torch's threads are shared out among them.
    what, remedy : str
        What `given` is, and what helps if it cannot be sent, for errors.

    Attributes
    ----------
    running : dict of Connection to process

    Raises
    ------
    TypeError
        `given` cannot be pickled.
    """

    def __init__(self, work: Work, given: Any, number: int, what: str, remedy: str) -> None:
        try:
            self._given: bytes = pickler.dumps(given)
        except Exception as error:  # of many kinds
            if pickler is pickle:
                remedy += ", or install cloudpickle"
            raise TypeError(
                f"workers={number}: {what} cannot be sent to another process, {described(error)}: "
                f"{remedy}; or use workers=1"
            ) from error
        self._work, self.number = work, number
        self.running: dict[Connection, BaseProcess] = {}
        Finalize(self, _end, (self.running,), exitpriority=10)

    def close(self) -> None:
        """End the processes, whatever they are at."""
        _end(self.running)

    def start(self, count: int) -> None:
        """Start processes, and wait until all are ready; raise RuntimeError if one does not start."""
        torch: Any = sys.modules.get("torch")
        threads = torch.get_num_threads() if torch else os.cpu_count() or 1
        method = multiprocessing.get_context("spawn")
        new: dict[Connection, BaseProcess] = {}
        for _ in range(count):
            connection, theirs = method.Pipe()
            told = theirs, self._work, max(1, threads // self.number)
            # no daemon: a client's DataLoader may have processes of its own
            process: BaseProcess = method.Process(
                target=_serve, args=(*told, logging.getLogger("flwr").level), daemon=False
            )
            process.start()
            self.running[connection] = new[connection] = process
            theirs.close()
            with contextlib.suppress(OSError):  # it is dead: that shows when it should be ready
                connection.send_bytes(self._given)
        for connection, process in new.items():
            try:
                said = connection.recv()
            except (EOFError, OSError):
                process.join()
                said = (
                    f"it ended with exit code {process.exitcode}; in a script, start the training under "
                    "`if __name__ == '__main__':`, because each worker imports the script"
                )
            if said != _READY:
                raise RuntimeError(
                    f"workers={self.number}: a worker process does not start: {said}"
                )

    def buried(self, connection: Connection) -> str:
        """Forget a process that is gone; return how it ended."""
        process = self.running.pop(connection)
        connection.close()
        process.join()
        code = process.exitcode
        why = f" ({signal.Signals(-code).name})" if code and code < 0 else ""
        return f"ended with exit code {code}{why}"


def _end(running: dict[Connection, BaseProcess]) -> None:
    processes = list(running.values())
    for connection in running:
        connection.close()
    running.clear()
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _serve(connection: Connection, work: Work, threads: int, level: int) -> None:
    """Run in a process of its own."""
    import torch  # not where the server is

    # Ctrl-C goes to the process that asks, too, which ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("flwr").setLevel(level)
    torch.set_num_threads(threads)
    try:
        given = pickle.loads(connection.recv_bytes())
    except EOFError:
        return
    except Exception as error:  # whatever the user's modules raise
        connection.send(f"what it was given cannot be read there, {described(error)}")
        return
    connection.send(_READY)
    work(connection, given)


Part = tuple[dict[int, Answer], dict[str, int]]
"""What one process made of its clients: what came of them, and why others train by themselves."""


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
        remedy = "give them functions that stand in a module, not lambdas"
        self._pool = WorkerPool(_work, (clients, who, settings), number, "these clients", remedy)

    def close(self) -> None:
        """End the processes; the next clients start new ones."""
        self._pool.close()

    def train(self, asked: Sequence[Asked]) -> list[Part]:
        """Return what each process made of its part of the clients; nothing, if it has ended."""
        pool, shared = self._pool, SHARED if SHARED.is_dir() else None
        size = -(-len(asked) // pool.number)
        parts = [asked[i : i + size] for i in range(0, len(asked), size)]
        with TemporaryDirectory(prefix="flwr-regs-", dir=shared) as folder:
            try:
                pool.start(pool.number - len(pool.running))
                workers = list(pool.running)[: len(parts)]
                for worker, part in zip(workers, parts, strict=True):
                    tasks = [(a.pid, a.client.step_budget, a.message, a.memory) for a in part]
                    with contextlib.suppress(ConnectionError):  # it has ended: see `_received`
                        _send(worker, folder, (folder, tasks))
                return [self._received(*of) for of in zip(workers, parts, strict=True)]
            except BaseException:  # such as Ctrl-C: what the processes are at is of no use
                self.close()
                raise

    def _received(self, worker: Connection, part: Sequence[Asked]) -> Part:
        try:
            return _read(worker)  # type: ignore[no-any-return]
        except (EOFError, OSError):
            why = f"a process that trains a stack {self._pool.buried(worker)}"
            return {}, {why: len(part)}


def _work(connection: Connection, given: tuple[ClientSets, Identity, Settings]) -> None:
    """Train what comes until the asking process is gone."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # the asking process says it
    clients, who, settings = given
    stacks, made = Stacks(settings), dict[int, OneClient]()
    while True:
        try:
            folder, tasks = _read(connection)
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
        _send(connection, folder, (served, stacks.fallbacks))


def _send(connection: Connection, folder: str | Path, value: Any) -> None:
    """Send a value; its arrays go through a file of a folder in memory, which the receiver removes."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [b.raw() for b in buffers]
    sizes, path = [v.nbytes for v in views], ""
    if sum(sizes):
        handle, path = mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.writelines(views)
    connection.send((data, sizes, path))


def _read(connection: Connection) -> Any:
    """Return a value that was sent; its arrays are views of the shared memory."""
    data, sizes, path = connection.recv()
    whole = memoryview(b"")
    if path:
        with open(path, "r+b") as file:
            whole = memoryview(mmap.mmap(file.fileno(), 0))
        os.unlink(path)
    ends = zip(sizes, accumulate(sizes), strict=True)
    return pickle.loads(data, buffers=[whole[end - size : end] for size, end in ends])
