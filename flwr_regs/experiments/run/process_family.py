"""The processes that a process has started end with it: also Ray's, which leave their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 5.0
"""Seconds in which processes that are killed must be gone."""


def adopt() -> None:
    """Make this process the parent of what its children leave behind (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, and those that they started (Linux; else none)."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # "pid (name) state ppid …", and the name may hold spaces and brackets
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":  # a zombie has ended
                parents[int(stat.parent.name)] = int(parent)
    family = [pid]
    for one in family:
        family += [child for child, parent in parents.items() if parent == one]
    return family[1:]


def end_descendants(pid: int) -> None:
    """Kill the processes that `pid` started, and those that they started."""
    deadline = time.monotonic() + PATIENCE
    while (family := descendants(pid)) and time.monotonic() < deadline:
        for one in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.02)
