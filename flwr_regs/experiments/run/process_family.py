"""The processes that a process has started end with it: also Ray's, which leave their parent."""

from __future__ import annotations

import contextlib
import ctypes
import time

from flwr_regs.experiments.extras import needed

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 5.0
"""Seconds in which processes that are killed must be gone."""


def adopt() -> None:
    """Make this process the parent of what its children leave behind (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(pid: int) -> None:
    """Kill the processes that `pid` started, and those that they started."""
    psutil = needed("psutil", "psutil", "ending a run's processes")
    deadline, living = time.monotonic() + PATIENCE, True
    while living and time.monotonic() < deadline:
        living = False
        with contextlib.suppress(psutil.NoSuchProcess):  # gone in the meantime
            for process in psutil.Process(pid).children(recursive=True):
                if process.status() != psutil.STATUS_ZOMBIE:  # a zombie has ended
                    living = True
                    process.kill()
        time.sleep(0.02)
