"""How a process ends: in time, and with all that it has started, also Ray's, which leave their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from flwr_regs.experiments.extras import needed

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 5.0
"""Seconds in which processes that are killed must be gone."""
GRACE = 1.5
"""Seconds that a process has to end in order, after Ctrl-C or SIGTERM."""
_FAREWELL = "flwr-regs: interrupted"
"""What a signal that ends this process makes it say; empty once it has said it."""


class WorkerKilled(RuntimeError):
    """A process that trains was killed; what it has written is kept."""


@contextlib.contextmanager
def ending_in_time() -> Iterator[None]:
    """End this process, and what it has started, `GRACE` seconds after Ctrl-C or SIGTERM if it still runs.

    Python handles a signal between two steps of its own, and one step of torch may take minutes. The system
    writes to the wakeup descriptor at once, and a thread reads it. (Windows would need a socket.)
    """
    if os.name == "nt":
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    done = threading.Event()
    threading.Thread(target=_end_after_a_signal, args=(reader, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(before)
        os.close(writer)


def _end_after_a_signal(reader: int, done: threading.Event) -> None:
    while signals := os.read(reader, 1):  # nothing: the pipe is closed, and the command is done
        if signals[0] in (signal.SIGINT, signal.SIGTERM) and not done.wait(GRACE):
            say_farewell()
            with contextlib.suppress(ImportError):
                end_descendants(os.getpid())
            os._exit(128 + signals[0])
    os.close(reader)


def on_farewell(text: str) -> None:
    """Say `text` when a signal ends this process."""
    global _FAREWELL
    _FAREWELL = text


def say_farewell() -> None:
    """Say once what a signal has ended, and how to go on."""
    global _FAREWELL
    text, _FAREWELL = _FAREWELL, ""
    if text:
        print(text, file=sys.stderr, flush=True)


def adopt() -> None:
    """Make this process the parent of what its children leave behind (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(pid: int) -> None:
    """Kill the processes that `pid` started, and those that they started."""
    psutil = needed("psutil", "psutil", "ending a run's processes")
    deadline, living = time.monotonic() + PATIENCE, True
    while living and time.monotonic() < deadline:
        living, family = False, []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(pid).children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # gone in the meantime
                if process.status() != psutil.STATUS_ZOMBIE:  # a zombie has ended
                    living = True
                    process.kill()
        time.sleep(0.02)
