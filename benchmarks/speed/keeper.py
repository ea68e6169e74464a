"""Ends a command, and all that it started, when the process that asked for it is gone: however it died.

``python -m benchmarks.speed.keeper FOLDER COMMAND …`` runs the command until it ends, or until
its own standard input is closed, as it is when the process at its other end dies. Then it removes FOLDER.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from select import select

from flwr_regs.experiments.run.process_family import adopt, end_descendants

PATIENCE = 1.0
"""Seconds that a command gets to end by itself."""


def keep(folder: str, command: Sequence[str]) -> int:
    """Run a command, then remove `folder`; return the command's exit status, or 1 if it was ended here."""
    adopt()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the asking process decides
        signal.signal(number, signal.SIG_IGN)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while process.poll() is None:
        if select([sys.stdin], [], [], 0.2)[0] and not os.read(sys.stdin.fileno(), 1):
            break
    code = process.poll()
    if code is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    end_descendants(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if code is None else code


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], sys.argv[2:]))
