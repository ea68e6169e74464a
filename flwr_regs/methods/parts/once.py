"""Notes in the log that stand there once in a training, which has many rounds, clients and steps."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from flwr_regs.term import ClientContext, Slot
from flwr_regs.wire import keys

LOG = logging.getLogger("flwr")
_logged: set[tuple[Any, str]] = set()


def log_once(text: str, name: str, ctx: ClientContext) -> None:
    """Log a client's warning once in a process, for each training and term `name`."""
    key = ctx.config.get(keys.START_KEY), name
    if key not in _logged:
        _logged.add(key)
        LOG.warning(text)


def unstable(name: str, setting: str, value: float, most: float, now: str) -> str:
    """Return what to say of the pull of a term `name` whose explicit steps are too long."""
    return (
        f"'{name}' has {setting}={value:g}, but its explicit steps are stable only up to {setting}="
        f"{most:.3g} (as {now} now): the model may diverge. Use a smaller {setting}, or implicit=True"
    )


def warn_once(key: str, server: Slot, text: str) -> Slot:
    """Log a server's warning, if there is a text and `server` has no note `key`; return the note."""
    if text and key not in server:
        LOG.warning(text)
    return {key: np.asarray(True)} if text or key in server else {}
