"""Folders for results: one of its own for each run, that can be written, and that one process writes to."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from flwr_regs.wire.files import claim, write_atomically

LOCK = ".lock"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk, or a share of it, that is full."""


def new_folder(parent: Path) -> Path:
    """Make and return ``parent/<time>``; with a number behind it if another run began in the same second.

    Raises ValueError if it cannot be written.
    """
    check_writable(parent)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in count(1):
        folder = parent / (stamp if number == 1 else f"{stamp}.{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)  # another command may have taken the parent away
            return folder
    raise AssertionError("there is always a next number")


def check_writable(folder: Path, keep: bool = True) -> None:
    """Make a folder if need be; raise ValueError if no file can be written there.

    Unless it is to `keep` the folder, it removes what it has made.
    """
    trial = folder / f".trial-{os.getpid()}"
    made = [] if keep else [of for of in (folder, *folder.parents) if not of.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"0")
        trial.unlink()
    except OSError as error:
        text = f"results cannot be written into {folder} ({error.strerror or error})"
        raise ValueError(f"{text}: give another out=") from error
    finally:
        for empty in made:
            with suppress(OSError):  # not made, or no longer empty
                empty.rmdir()


class CannotWrite(OSError):
    """Results cannot be written; the message names the file."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file if it cannot be written: the disk may be full."""
    try:
        yield
    except OSError as error:
        room = ": make room" if error.errno in FULL else ""
        text = f"{path} cannot be written ({error.strerror or error}{room})"
        raise CannotWrite(f"{text}; all written before is kept") from error


def write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; a text in UTF-8."""
    with writing(path):
        write_atomically(path, [content.encode() if isinstance(content, str) else content], 0o666)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing results into a folder; ValueError if one does so already."""
    try:
        release = claim(folder / LOCK)
    except BlockingIOError as error:
        raise ValueError(f"{folder} is being written by another run ({error})") from None
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror or error})") from error
    try:
        yield
    finally:
        release()
