"""Files that a crash leaves whole: written beside their place, synced to the disk, and then moved there."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

LOG = logging.getLogger("flwr")
NO_LOCKS = "%s is on a disk without locks: another run in this folder would not be noticed"
CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""The errors of a file system that lacks what is asked of it."""


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview], mode: int = 0o600) -> None:
    """Write or replace a file; by default, only its owner can read it. Raise OSError.

    A crash leaves the old file or the new one, and perhaps ``.<name>.<process>.part`` beside it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    beside.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(beside, flags, mode), "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's list of names, where the system can (Windows opens no folders) and the disk can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network disks and shared folders sync files alone
        if error.errno not in CANNOT:
            raise
    finally:
        os.close(descriptor)


def claim(path: Path, surely: bool = False) -> Callable[[], None]:
    """Lock a file that stands for a folder; return what gives it up, as the end of the process also does.

    On a disk that knows no locks, as on some clusters, nothing is locked, and two may claim a folder;
    `surely` makes that an OSError.

    Raises BlockingIOError, which names the process that holds it, and OSError if it cannot be written,
    or is a link: what it leads to would be overwritten.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, f"its {path.name} is a link") from None
        raise
    try:
        if sys.platform == "win32":
            import msvcrt

            # beyond the text: nobody can read what is locked
            os.lseek(descriptor, 2**30, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.lseek(descriptor, 0, os.SEEK_SET)
        holder = os.read(descriptor, 20).decode(errors="replace").strip()
        os.close(descriptor)
        raise BlockingIOError(f"process {holder or 'unknown'}") from None
    except OSError as error:
        if surely or error.errno not in (*CANNOT, errno.ENOLCK):
            os.close(descriptor)
            raise
        LOG.warning(NO_LOCKS, path.parent)
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except OSError:  # the disk is full
        os.close(descriptor)
        raise
    return partial(os.close, descriptor)
