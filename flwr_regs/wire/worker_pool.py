"""Processes that work for this one: on the clients of a cohort, on stacks of them, or on whole runs.

Processes and not threads: what a client draws (shuffling, dropout) comes from torch's generators, which a
process has once. They are started anew ("spawn") and not forked: torch's threads do not survive a fork. So
what they are given is pickled. All that lasts stays in the process that asks. Arrays go through shared
memory. torch is loaded in the processes alone.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory, gettempdir
from typing import Any

from flwr_regs.wire.errors import described
from flwr_regs.wire.files import claim

try:
    import cloudpickle as pickler  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    pickler = pickle

SHARED = Path("/dev/shm")
PREFIX = "flwr-regs-arrays-"
Answers = Generator[tuple[int, Any], None, None]
_READY = "ready"
_SENDING = threading.Lock()
"""Held while a connection is written to: a task may have threads that tell."""


class Ended(str):
    """In place of an answer: how the process ended that had the task."""


@dataclass(frozen=True)
class News:
    """What a process tells before its answer: see `tell`."""

    told: Any


class WorkerPool:
    """Some processes that answer tasks; they end with this object.

    Parameters
    ----------
    make : callable
        A function of a module: ``make(given)`` is, in each process, the function that answers a task.
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
    RuntimeError
        This process is a daemon of multiprocessing, and may start no others.
    """

    def __init__(self, make: Any, given: Any, number: int, what: str, remedy: str) -> None:
        if multiprocessing.current_process().daemon:
            pool = "this process, such as one of a multiprocessing.Pool, may start no others"
            raise RuntimeError(f"workers={number}: {pool}" + ": use workers=1" * (number > 1))
        _remove_left()
        self._make, self._given, self._words, self.number = make, given, (what, remedy), number
        self._sent: bytes | None = self._pickled()
        self.running: dict[Connection, BaseProcess] = {}
        Finalize(self, _end, (self.running,), exitpriority=10)

    def _pickled(self) -> bytes:
        try:
            return pickler.dumps(self._given)  # type: ignore[no-any-return, unused-ignore]
        except Exception as error:  # of many kinds
            what, remedy = self._words
            if pickler is pickle:
                remedy += ", or install cloudpickle"
            raise TypeError(
                f"workers={self.number}: {what} cannot be sent to another process, "
                f"{described(error)}: {remedy}; or use workers=1"
            ) from error

    def close(self) -> None:
        """End the processes, whatever they are at; the next tasks start new ones, as `given` is then."""
        _end(self.running)
        self._sent = None

    def answers(self, tasks: Sequence[Any], lanes: Sequence[Any]) -> Answers:
        """Yield (a task's place, its answer) as the answers come, or `Ended`; `News` before an answer.

        Of tasks in one of the `lanes`, each waits until the one before it is answered. Close the generator
        if it may not run to its end: that ends the processes. Raises RuntimeError if one does not start.
        """
        waiting, at = [*range(len(tasks))], dict[Connection, int]()
        with contextlib.ExitStack() as stack:
            folders = _folders(stack)
            try:
                while waiting or at:
                    self._start(min(self.number, len(waiting) + len(at)) - len(self.running))
                    for worker in [w for w in self.running if w not in at]:
                        busy = {lanes[k] for k in at.values()}
                        k = next((k for k in waiting if lanes[k] not in busy), None)
                        if k is None:
                            break
                        waiting.remove(k)
                        at[worker] = k
                        with contextlib.suppress(ConnectionError):  # it has ended: see below
                            _send(worker, folders, (folders, tasks[k]))
                    ended: Any = wait(list(at))
                    for worker in ended:
                        try:
                            answer = _read(worker)
                        except (EOFError, OSError):  # it ended before its answer, or within it
                            answer = Ended(self._buried(worker))
                        k = at[worker]
                        if not isinstance(answer, News):
                            del at[worker]
                        yield k, answer
            except BaseException:  # such as Ctrl-C: what the processes are at is of no use
                self.close()
                raise

    def _start(self, count: int) -> None:
        """Start processes, and wait until all are ready."""
        if count < 1:
            return
        given = self._sent = self._sent or self._pickled()
        torch: Any = sys.modules.get("torch")
        threads = torch.get_num_threads() if torch else os.cpu_count() or 1
        how = self._make, max(1, threads // self.number), logging.getLogger("flwr").level
        method, new = multiprocessing.get_context("spawn"), list[Connection]()
        for _ in range(count):
            connection, theirs = method.Pipe()
            # no daemon: a client's DataLoader may have processes of its own
            process: BaseProcess = method.Process(target=_serve, args=(theirs, *how), daemon=False)
            with _ctrl_c_blocked():
                process.start()
            self.running[connection] = process
            new.append(connection)
            theirs.close()
            with contextlib.suppress(OSError):  # it is dead: that shows when it should be ready
                connection.send_bytes(given)
        for connection in new:
            try:
                said = connection.recv()
            except (EOFError, OSError):
                said = (
                    f"it {self._buried(connection)}; in a script, start the training under "
                    "`if __name__ == '__main__':`, because each worker imports the script"
                )
                main = getattr(sys.modules["__main__"], "__file__", None)
                if main and not Path(main).is_file():
                    said += f"; {main} cannot be imported: put the script into a file"
            if said != _READY:
                raise RuntimeError(f"workers={self.number}: a worker does not start: {said}")

    def _buried(self, connection: Connection) -> str:
        """Forget a process that is gone; return how it ended."""
        process = self.running.pop(connection)
        connection.close()
        process.join()
        code = process.exitcode
        why = f" ({signal.Signals(-code).name})" if code and code < 0 else ""
        return f"ended with exit code {code}{why}"


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Hold Ctrl-C back; a process that starts meanwhile does not get it either."""
    if os.name == "nt":
        yield
        return
    resource_tracker.ensure_running()  # by its start it would let Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _folders(stack: contextlib.ExitStack) -> list[str]:
    """Make folders for arrays, the fastest first; with the stack they go."""
    made = []
    for place in [*[SHARED] * SHARED.is_dir(), None]:
        try:
            folder = stack.enter_context(TemporaryDirectory(prefix=PREFIX, dir=place))
            stack.callback(claim(lock := Path(folder, ".part")))
        except OSError:  # a container's shared memory may be full, or not for writing
            if place is None:
                raise
            continue
        with contextlib.suppress(OSError):  # Windows moves no open file: what is left stays
            lock.rename(lock.with_name(".lock"))  # it shows once it is locked
        made.append(folder)
    return made


def _remove_left() -> None:
    """Remove the folders of arrays that killed processes have left; those of living ones are locked."""
    for place in (SHARED, Path(gettempdir())):
        for lock in place.glob(f"{PREFIX}*/.lock"):
            with contextlib.suppress(OSError):  # it is in use, or another user's
                release = claim(lock, surely=True)
                shutil.rmtree(lock.parent, ignore_errors=True)
                release()


def _end(running: dict[Connection, BaseProcess]) -> None:
    while running:
        connection, process = running.popitem()
        connection.close()
        process.kill()
        process.join()


def _serve(*given: Any) -> None:
    """Answer tasks in a process of its own, until the asking process is gone."""
    try:
        _answer_tasks(*given)
    except OSError:  # a pipe that is broken, or a folder that is away
        asking = multiprocessing.parent_process()
        if asking is None or asking.is_alive():
            raise


def _answer_tasks(
    connection: Connection, make: Callable[[Any], Any], threads: int, level: int
) -> None:
    import torch  # not where the server is

    # Ctrl-C goes to the process that asks, too, which ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("flwr").setLevel(level)
    torch.set_num_threads(threads)
    try:
        data = connection.recv_bytes()
    except (EOFError, OSError):
        return
    try:
        answer = make(pickle.loads(data))
    except Exception as error:  # whatever the user's modules raise
        connection.send(f"what it was given cannot be read there, {described(error)}")
        return
    connection.send(_READY)
    global _answer_with
    while True:
        try:
            folders, task = _read(connection)
        except (EOFError, OSError):  # alone: what the task itself raises must show
            return
        _answer_with = partial(_send, connection, folders)
        _answer_with(answer(task))


def tell(told: Any) -> None:
    """Send `News` to the process that asks. A task calls this, in the worker that is at it."""
    _answer_with(News(told))


_answer_with: Callable[[Any], None]


def _send(connection: Connection, folders: Sequence[str], value: Any) -> None:
    """Send a value, its arrays through a file of the first folder with room; the receiver removes it."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [b.raw() for b in buffers]
    for folder in folders:
        try:
            with NamedTemporaryFile(dir=folder, delete=False) as file:
                file.writelines([*views, b"end"])  # an empty file could not be mapped
            break
        except OSError:
            if folder == folders[-1]:
                raise
    with _SENDING:
        connection.send((data, [v.nbytes for v in views], file.name))


def _read(connection: Connection) -> Any:
    """Return a value that was sent; its arrays are views of the shared memory."""
    data, sizes, path = connection.recv()
    with open(path, "r+b") as file:
        # Windows removes no file that is mapped
        mapped = sys.platform != "win32"
        whole = memoryview(mmap.mmap(file.fileno(), 0) if mapped else bytearray(file.read()))
    os.unlink(path)
    ends = zip(sizes, accumulate(sizes), strict=True)
    return pickle.loads(data, buffers=[whole[end - size : end] for size, end in ends])
