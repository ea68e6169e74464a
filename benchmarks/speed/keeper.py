"""Ends a command, and all that it started, when the process that asked for it is gone: however it died.

``python -m benchmarks.speed.keeper FOLDER COMMAND …`` runs the command until it ends, or until
its own standard input is closed, as it is when the process at its other end dies. Then it removes FOLDER.
Ray's processes leave the session and the parent that started them; on Linux the keeper adopts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from select import select

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 1.0
"""Seconds that a command gets to end by itself."""


def keep(folder: str, command: Sequence[str]) -> int:
    """Run a command, then remove `folder`; return the command's exit status, or 1 if it was ended here."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the asking process decides
        signal.signal(number, signal.SIG_IGN)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while process.poll() is None:
        if select([sys.stdin], [], [], 0.2)[0] and not os.read(sys.stdin.fileno(), 1):
            break
    code = process.poll()
    ours = descendants(os.getpid())
    if code is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    deadline = time.monotonic() + 5
    while ours and time.monotonic() < deadline:
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
        ours = descendants(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if code is None else code


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, and those that they started (Linux; else none)."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # "pid (name) state ppid …", and the name may hold spaces and brackets
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = [pid]
    for one in family:
        family += [child for child, parent in parents.items() if parent == one]
    return family[1:]


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], sys.argv[2:]))
