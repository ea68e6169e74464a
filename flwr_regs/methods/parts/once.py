"""A note in the log that stands there once in a training, which has many clients and steps."""

from __future__ import annotations

import logging
from typing import Any

from flwr_regs.term import ClientContext
from flwr_regs.wire import keys

LOG = logging.getLogger("flwr")
_logged: set[tuple[Any, str, int]] = set()


def log_once(level: int, text: str, name: str, ctx: ClientContext) -> None:
    """Log a client's text once in a process, for each training, term `name` and level."""
    key = ctx.config.get(keys.START_KEY), name, level
    if key not in _logged:
        _logged.add(key)
        LOG.log(level, text)
