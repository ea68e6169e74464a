"""Processes that run a ClientApp for InProcessGrid, several clients at once.

Processes and not threads: what a client draws (shuffling, dropout) comes from torch's generators, which a
process has once. They are started anew ("spawn") and not forked: torch's threads do not survive a fork. So
the app is pickled. All that lasts, the clients' contexts, stays in this process.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import zlib
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flwr_regs.flower.compat import identify
from flwr_regs.flower.node import failure
from flwr_regs.wire.errors import described

try:
    import cloudpickle as pickler  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    pickler = pickle

_READY = "ready"


def served(app: ClientApp, message: Message, context: Context) -> Message:
    """Return the app's reply; if it raises, an error, and ``context.state`` stays as it was."""
    before = {key: record.copy() for key, record in context.state.items()}
    message_type = message.metadata.message_type
    try:
        return app(message, context)
    except Exception as error:  # whatever an app that is not ours raises
        context.state = type(context.state)(before)
        message.metadata.message_type = message_type
        return failure(message, error)


class Workers:
    """Some processes, each with the app. They start with the first messages, and end with this object.

    Parameters
    ----------
    app : ClientApp
    number : int

    Raises
    ------
    TypeError
        The app cannot be pickled.
    """

    def __init__(self, app: ClientApp, number: int) -> None:
        try:
            self._app: bytes = pickler.dumps(app)
        except Exception as error:  # of many kinds
            remedy = (
                "give client_app a function that stands in a module, not a lambda or an inner one"
            )
            if pickler is pickle:
                remedy += ", or install cloudpickle"
            raise TypeError(
                f"workers={number}: this app cannot be sent to another process, "
                f"{described(error)}: {remedy}; or use workers=1"
            ) from error
        self._number = number
        self._running: dict[Connection, BaseProcess] = {}
        Finalize(self, _end, (self._running,), exitpriority=10)

    def close(self) -> None:
        """End the processes; later messages start new ones."""
        _end(self._running)

    def run(self, messages: Sequence[Message], contexts: Sequence[Context]) -> list[Message]:
        """Return the replies to the messages in their order; the contexts then hold the new states.

        A client whose process dies has an error for a reply, and keeps its state. Raises RuntimeError if a
        process does not start.
        """
        try:
            return self._run(messages, contexts)
        except BaseException:  # such as Ctrl-C: what the processes are at is of no use
            self.close()
            raise

    def _run(self, messages: Sequence[Message], contexts: Sequence[Context]) -> list[Message]:
        replies: dict[int, Message] = {}
        waiting, at = list(range(len(messages))), dict[Connection, int]()
        if not self._running:
            self._start(min(self._number, len(messages)))
        while len(replies) < len(messages):
            if len(self._running) < min(self._number, len(waiting) + len(at)):
                self._start(1)
            for worker in [w for w in self._running if w not in at]:
                busy = {id(contexts[k]) for k in at.values()}
                # two messages to one client: the second needs the state after the first
                k = next((k for k in waiting if id(contexts[k]) not in busy), None)
                if k is None:
                    break
                waiting.remove(k)
                at[worker] = k
                self._send(worker, (messages[k], contexts[k], _seed(messages[k]), _settings()))
            ended: Any = wait(list(at))
            for worker in ended:
                k = at.pop(worker)
                try:
                    replies[k], contexts[k].state = worker.recv()
                except (EOFError, OSError):
                    replies[k] = failure(messages[k], self._died(worker, contexts[k]))
        return [replies[k] for k in range(len(messages))]

    def _start(self, number: int) -> None:
        """Start processes, and wait until all are ready."""
        torch: Any = sys.modules.get("torch")
        threads = torch.get_num_threads() if torch else os.cpu_count() or 1
        share = max(1, threads // self._number)
        method = multiprocessing.get_context("spawn")
        new: dict[Connection, BaseProcess] = {}
        for _ in range(number):
            connection, theirs = method.Pipe()
            level = logging.getLogger("flwr").level
            # No daemon: a client's DataLoader may have processes of its own.
            process: BaseProcess = method.Process(
                target=_work, args=(theirs, share, level), daemon=False
            )
            process.start()
            self._running[connection] = new[connection] = process
            theirs.close()
            self._send(connection, self._app)
        for worker, process in new.items():
            try:
                said = worker.recv()
            except (EOFError, OSError):
                process.join()
                said = (
                    f"it ended with exit code {process.exitcode}; in a script, start the training under "
                    "`if __name__ == '__main__':`, because each worker imports the script"
                )
            if said != _READY:
                raise RuntimeError(
                    f"workers={self._number}: a worker process does not start: {said}"
                )

    @staticmethod
    def _send(worker: Connection, what: Any) -> None:
        with contextlib.suppress(OSError):  # it is dead: that shows when its reply is read
            worker.send(what)

    def _died(self, worker: Connection, context: Context) -> RuntimeError:
        process = self._running.pop(worker)
        worker.close()
        process.join()
        client, code = context.node_config.get("partition-id", context.node_id), process.exitcode
        why = f" ({signal.Signals(-code).name})" if code and code < 0 else ""
        return RuntimeError(f"the process of client {client} ended with exit code {code}{why}")


def _end(running: dict[Connection, BaseProcess]) -> None:
    """End all processes, whatever they are at."""
    processes = list(running.values())
    for worker in running:
        worker.close()
    running.clear()
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _seed(message: Message) -> int:
    """Return the seed of what a client draws without one, such as a new model's values in `client_fn`.

    It does not depend on which process gets the message.
    """
    torch: Any = sys.modules.get("torch")
    said = message.metadata
    base = torch.initial_seed() if torch else 0
    return zlib.crc32(f"{base} {said.dst_node_id} {said.group_id} {said.message_type}".encode())


def _settings() -> tuple[Any, ...] | None:
    """Return what a script may have set in this process's torch, and on which a client's bits depend."""
    if (torch := sys.modules.get("torch")) is None:
        return None
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _work(connection: Connection, threads: int, level: int) -> None:
    """Run in a process of its own: serve messages until the grid's process is gone."""
    import torch  # not where the server is

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the grid's process too, which ends this
    logging.getLogger("flwr").setLevel(level)
    torch.set_num_threads(threads)
    identify()
    try:
        app = pickle.loads(connection.recv())
    except EOFError:
        return
    except Exception as error:  # whatever the user's modules raise
        connection.send(f"the app cannot be read there, {described(error)}")
        return
    connection.send(_READY)
    while True:
        try:
            message, context, seed, settings = connection.recv()
        except (EOFError, OSError):
            return
        if settings is not None:
            dtype, precision, deterministic, warns = settings
            torch.set_default_dtype(dtype)
            torch.set_float32_matmul_precision(precision)
            torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # for code that draws so
        torch.manual_seed(seed)
        reply = served(app, message, context)
        connection.send((reply, context.state))
