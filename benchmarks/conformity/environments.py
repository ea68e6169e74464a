"""Other libraries' environments, and drivers run in them as processes of their own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import host
from .loops import LOOPS
from .loops.run import Task

INSTALL_SECONDS, DRIVE_SECONDS = 1800, 900
"""How long an installation, and one method's run, may take."""


class CannotRun(Exception):
    """A library was not installed or did not run, and the text says why."""


def default_folder() -> Path:
    """Return where environments are kept: in the user's cache."""
    return Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flwr-regs", "conformity"
    )


def prepare(name: str, packages: Sequence[str], folder: Path) -> str:
    """Return the Python of an environment that has `packages`, which is made if it is not there.

    An environment is for these packages and this version of Python. One whose installation was cut off is
    made again. Raises CannotRun if it cannot be made, for example without a network.
    """
    pins = " ".join((*packages, sys.version))
    home = folder / f"{name}-{hashlib.sha256(pins.encode()).hexdigest()[:12]}"
    python, done = home / "bin" / "python", home / "complete"
    if os.name == "nt":
        python = home / "Scripts" / "python.exe"
    if not done.exists():
        shutil.rmtree(home, ignore_errors=True)
        _call([sys.executable, "-m", "venv", str(home)], f"{name}'s environment", INSTALL_SECONDS)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input"]
        _call([*pip, *packages], f"the installation of {', '.join(packages)}", INSTALL_SECONDS)
        done.touch()
    return str(python)


def fetch(repository: str, commit: str, folder: Path) -> Path:
    """Return a folder with the repository's files at `commit`, fetched with git if it is not there.

    Raises CannotRun if git fails, for example without a network.
    """
    home = folder / f"{repository.rpartition('/')[2]}-{commit[:12]}"
    done = home / ".git" / "complete"
    if not done.exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        git, what = ["git", "-C", str(home)], f"the fetch of {repository} at {commit}"
        for command in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth=1", repository, commit],
            ["checkout", "--quiet", commit],
        ):
            _call([*git, *command], what, INSTALL_SECONDS)
        done.touch()
    return home


def drive(
    python: str,
    driver: str,
    task: Task,
    method: str,
    variables: Mapping[str, str] | None = None,
    isolated: bool = True,
) -> dict[str, Any]:
    """Run a driver on a task under a Python, and return its result (`host.write_result`).

    An `isolated` Python sees neither the caller's PYTHON* variables nor its folder. Raises CannotRun if
    the driver fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "task.npz"), Path(folder, "result.npz")
        host.write_task(source, as_dict(task, method))
        command = [python, *(["-I"] if isolated else []), host.__file__]
        _call(
            [*command, str(source), driver, str(target)],
            f"{driver} for {method}",
            DRIVE_SECONDS,
            {"OMP_NUM_THREADS": "1", **(variables or {})},
        )
        try:
            return host.read_result(target)
        except (OSError, ValueError, IndexError) as error:
            raise CannotRun(f"{driver} for {method} wrote no readable result: {error}") from error


def as_dict(task: Task, method: str) -> dict[str, Any]:
    """Return the task as drivers get it (`host.read_task`)."""
    return {
        "method": method,
        "parameters": task.parameters,
        "clients": [{"x": x, "y": y} for x, y in task.clients],
        "cohorts": task.cohorts,
        "lr": task.lr,
        "epochs": task.epochs,
        "batch_size": task.batch_size,
        "mu": task.mu,
        "momentum": task.momentum,
        "lr_decay": task.lr_decay,
        "settings": dict(task.settings.get(method, {})),
        "weights": LOOPS[method].weighting,
    }


def _call(
    command: Sequence[str], what: str, seconds: int, variables: Mapping[str, str] | None = None
) -> None:
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env={**os.environ, **(variables or {})},
        )
    except subprocess.TimeoutExpired as error:
        raise CannotRun(f"{what} took more than {seconds} s") from error
    except OSError as error:
        raise CannotRun(f"{what} did not start: {error}") from error
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if line.strip()] or ["no message"]
        last = next((x for x in lines[::-1] if "rror" in x), lines[-1])
        raise CannotRun(f"{what} failed: {last.strip()[:300]}")
