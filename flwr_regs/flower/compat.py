"""What Flower keeps private and this package needs, with what stands in its place in older versions.

Every other file imports from Flower's public packages alone: ``flwr.app``, ``flwr.client``,
``flwr.clientapp``, ``flwr.clientapp.mod``, ``flwr.common``, ``flwr.serverapp``, ``flwr.serverapp.strategy``
and ``flwr.simulation``. The versions are those in which a name was seen, of 1.22 to 1.42; docs/versions.md
says which ones are tested.

Loaded in every ClientApp process: no torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import flwr
import flwr.serverapp
from flwr.app import Context, Message
from flwr.common.constant import ErrorCode as ErrorCode  # 1.22 to 1.42
from flwr.common.serde import recorddict_from_proto as recorddict_from_proto  # 1.22 to 1.42
from flwr.common.serde import recorddict_to_proto as recorddict_to_proto  # 1.22 to 1.42

try:
    from flwr.serverapp.exception import PrivacyBudgetExhausted as PrivacyBudgetExhausted
except ImportError:  # to 1.34, which have no accountant that raises it
    PrivacyBudgetExhausted = None  # type: ignore[assignment, misc]

try:
    from flwr.supercore.run import Run as Run  # from 1.32
except ImportError:
    from flwr.common.typing import Run as Run  # type: ignore[attr-defined, no-redef]  # to 1.31

try:
    from flwr.supercore.task_identity import TaskIdentity  # from 1.38
except ImportError:
    TaskIdentity = None  # type: ignore[assignment, misc]  # a Message then needs no identity

ClientAppCallable = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, ClientAppCallable], Message]
"""Both as in ``flwr.clientapp.typing``, which has `Mod` from 1.32."""

FLOWER: str = flwr.__version__
"""The version of Flower that this process runs."""


def identify() -> None:
    """Give this process the identity that a Message needs, which Flower sets only in its own processes."""
    if TaskIdentity is not None and TaskIdentity._run_id is None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def numbered(message: Message) -> Message:
    """Give a message its id, and return it: Flower's own grids number what they send (1.22 to 1.42)."""
    message.metadata.__dict__["_message_id"] = str(uuid4())
    return message


def in_simulation(grid: Any) -> bool:
    """Return whether a grid is that of Flower's simulation (a private class, 1.22 to 1.42)."""
    return any(kind.__name__ == "InMemoryGrid" for kind in type(grid).__mro__)


def privacy_accounting() -> Any:
    """Return ``flwr.serverapp``, where Flower has its privacy accountants from 1.35 on.

    Raises
    ------
    ImportError
        This Flower has none.
    """
    if not hasattr(flwr.serverapp, "PrivacyConfig"):
        raise ImportError(
            f"Flower {FLOWER} has no privacy accountant, which came with 1.35; without one, "
            "CentralDP(clip_norm, noise_multiplier) clips and adds noise, but does not count epsilon"
        )
    return flwr.serverapp
