"""What the server knows of the clients' memory: what the next round of each begins with.

The clients' side of it, and the rule, are in ``client/memory.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from flwr_regs.server.round import Round
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel

LOG = logging.getLogger("flwr")


class Remembered:
    """By partition id, for clients that keep something, in this course of the training: two rounds.

    `came` is the last one whose reply arrived. `used` is the last one whose reply was used; 0: none of a
    client that keeps slots of terms. Both are set once a round has ended well.
    """

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._came: dict[int, int] = {}

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"used": dict(self._used), "came": dict(self._came)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        self._used, self._came = dict(state["used"]), dict(state["came"])

    def note(self, number: int, came: Mapping[int, Parcel], used: Collection[int]) -> None:
        """Note a round's replies, and whose were used; one that keeps nothing of the round says nothing."""
        for pid, reply in came.items():
            kept = str(reply.config.get(keys.KEEPS_KEY, ""))
            if kept:
                self._came[pid] = number
            if "state" in kept:
                self._used[pid] = number if pid in used else self._used.get(pid, 0)

    def entries(self, pid: int) -> dict[str, int]:
        """Return what a message says of it to one client."""
        known = {keys.USED_KEY: self._used, keys.CAME_KEY: self._came}
        return {key: rounds[pid] for key, rounds in known.items() if pid in rounds}


def name_losses(this_round: Round) -> None:
    """Warn of the clients of a round that lost what they kept, or could not save it."""
    if this_round.lost_state:
        LOG.warning(
            "clients %s have lost their state and began anew without", this_round.lost_state
        )
    if unsaved := sorted(p for p, r in this_round.came.items() if r.says(keys.UNSAVED_KEY)):
        this_round.events["not_saved"] = unsaved
        LOG.warning("clients %s could not save what they keep", unsaved)
    if this_round.lost_private:
        LOG.warning(
            "clients %s have lost their private entries and began anew with their model's own",
            this_round.lost_private,
        )
