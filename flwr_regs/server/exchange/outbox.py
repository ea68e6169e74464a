"""The content of a round's messages, client by client."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from flwr_regs.server.exchange.downlink import Downlink
from flwr_regs.server.exchange.remembered import Remembered
from flwr_regs.term import Slot
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel, Record

LOG = logging.getLogger("flwr")


def client_seed(seed: int, number: int, pid: int) -> int:
    """Return the seed of one client in one round, from (seed, round, partition id) alone."""
    return int(np.random.SeedSequence((seed, number, pid)).generate_state(1)[0])


class Outbox:
    """The content of a round's messages.

    Parameters
    ----------
    number, seed : int
        The round and the run's seed.
    config : mapping
        The round's config, the same for every client.
    downlink : Downlink
    held : mapping
        Partition id -> the round whose model that client last kept.
    remembered : Remembered
        What the clients' rounds begin with.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        config: Mapping[str, Any],
        downlink: Downlink,
        held: Mapping[int, int],
        remembered: Remembered,
    ) -> None:
        self._number = number
        self._seed = seed
        self._config = config
        self.downlink = downlink
        self._held = held
        self._remembered = remembered
        self.broadcasts: Mapping[int, Slot] = {}
        """Client -> its own broadcasts, after a first exchange."""

    def train(self, pid: int, lost: bool = False) -> Parcel:
        """Return a client's train message; one that `lost` its model gets everything."""
        return self._parcel(pid, None if lost else self._held.get(pid))

    def probe(self, pid: int, lost: bool = False) -> Parcel:
        """Return a client's message of the round's first exchange."""
        return self._parcel(pid, None if lost else self._held.get(pid), probe=True)

    def ahead(self, model: Record) -> Parcel:
        """Return the message that sends ``w_t`` ahead to a client of the next cohort."""
        names = (keys.METHOD_KEY, keys.START_KEY, keys.ROUND_KEY)
        return Parcel({keys.ARRAYS: model}, {k: self._config[k] for k in names})

    def catch_up(self, lost: Collection[int], tries: int) -> dict[int, str]:
        """Say which clients have `lost` their model; return why some of them cannot have it once more."""
        if tries:
            return dict.fromkeys(lost, "it says that it lacks the model that it was just sent")
        if gone := [p for p in lost if p in self._held]:
            LOG.warning("clients %s have lost their model; sending the full pair", gone)
        return {}

    def _parcel(self, pid: int, held_round: int | None, probe: bool = False) -> Parcel:
        records, entries = self.downlink.content(held_round, probe)
        mine = {} if probe else self.downlink.own(pid)
        for slots in (mine, self.broadcasts.get(pid, {})):
            for name, slot in slots.items():
                if slot:
                    key = f"{name}.broadcast"
                    records = {**records, key: Record({**records.get(key, {}), **slot})}
        own: dict[str, Any] = {
            keys.SEED_KEY: client_seed(self._seed, self._number, pid),
            keys.CLIENT_KEY: pid,
            **self._remembered.entries(pid),
        }
        if probe:
            own |= {keys.PROBE_KEY: True, keys.KEEP_KEY: True}
        return Parcel(records, {**self._config, **entries, **own})
