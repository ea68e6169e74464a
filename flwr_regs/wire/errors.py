"""An exception as one line of text: what was raised, and the line of the user's own code that led there."""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

from flwr_regs.wire.text import one_line

OURS = str(Path(__file__).parents[1]) + os.sep
LIBRARIES = ("flwr", "ray", "torch")
"""Packages that run a user's code; they may lie outside of site-packages."""
INSTALLED = ("site-packages", "dist-packages")
STANDARD = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib"))
WIDEST = 120
"""Characters of the source line."""


def described(error: BaseException) -> str:
    """Return ``"<type>: <text> (<file>, line <n>: <source>)"`` of an exception that was caught.

    The line is the deepest one in the user's own code: outside of this package, Flower, torch, installed
    packages and the standard library. Without such a line, it is the deepest one of this package.
    """
    notes = getattr(error, "__notes__", ())
    own = one_line(str(error))  # some libraries put whole programs into theirs
    text = one_line("; ".join(filter(None, [own, *notes])))
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{what}{place(error)}"


def place(error: BaseException) -> str:
    """Return ``" (<file>, line <n>: <source>)"`` of an exception that was caught; "" without a line."""
    frames: list[tuple[FrameType, int]] = []
    cause: BaseException | None = error
    while cause is not None:
        frames += traceback.walk_tb(cause.__traceback__)
        cause = cause.__cause__
    for belongs in (_is_users, _is_ours):
        if inside := [(frame, line) for frame, line in frames if belongs(frame)]:
            frame, line = inside[-1]
            file = frame.f_code.co_filename
            linecache.checkcache(file)  # it may have changed since it was loaded
            source = linecache.getline(file, line, frame.f_globals).strip()[:WIDEST]
            raised = source.startswith("raise ")  # its text says more than the line
            return f" ({file}, line {line}{f': {source}' if source and not raised else ''})"
    return ""


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return not (
        _is_ours(frame)
        or package in LIBRARIES
        or file.startswith(("<frozen", "<string>", *STANDARD))
        or any(folder in Path(file).parts for folder in INSTALLED)
    )
