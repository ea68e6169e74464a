"""What the server knows of the clients' memory: what the next round of each begins with.

The clients' side of it, and the rule, are in ``client/memory.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from flwr_regs.server.round import Round, Snapshots
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel

LOG = logging.getLogger("flwr")


class Remembered(Snapshots):
    """By partition id, rounds of this course of the training.

    Attributes
    ----------
    held : dict of int to int
        The round whose model a client last kept.
    came : dict of int to int
        Of a client that keeps something: the last round whose reply arrived.
    used : dict of int to int
        Of a client that keeps slots of terms: the last round whose reply was used; 0: none. Like `came`, it
        is set once a round has ended well.
    """

    kept = ("held", "came", "used")

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.came: dict[int, int] = {}
        self.used: dict[int, int] = {}

    def note(self, number: int, came: Mapping[int, Parcel], used: Collection[int]) -> None:
        """Note a round's replies, and whose were used; one that keeps nothing of the round says nothing."""
        self.held |= dict.fromkeys(came, number)
        for pid, reply in came.items():
            if keeps_state := reply.says(keys.KEEPS_STATE):
                self.used[pid] = number if pid in used else self.used.get(pid, 0)
            if keeps_state or reply.says(keys.KEEPS_PRIVATE):
                self.came[pid] = number

    def entries(self, pid: int, seed: int, number: int) -> dict[str, Any]:
        """Return the entries of a client's own in a message of a round; `seed` is the run's."""
        labels = [rounds[pid] for rounds in (self.used, self.came) if pid in rounds]
        return {
            keys.SEED_KEY: int(np.random.SeedSequence((seed, number, pid)).generate_state(1)[0]),
            keys.CLIENT_KEY: pid,
            **({keys.SNAPSHOTS_KEY: labels} if labels else {}),
        }


def name_losses(this_round: Round) -> None:
    """Warn of the clients of a round that lost what they kept, or could not save it."""
    if lost := this_round.lost["state"]:
        LOG.warning("clients %s have lost their state and began anew without", lost)
    if unsaved := sorted(p for p, r in this_round.came.items() if r.says(keys.NOT_SAVED)):
        this_round.events["not_saved"] = unsaved
        LOG.warning("clients %s could not save what they keep", unsaved)
    if lost := this_round.lost["private"]:
        LOG.warning(
            "clients %s have lost their private entries and began anew with their model's own", lost
        )
