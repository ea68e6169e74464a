"""Names the clients that lost what they kept between rounds, or could not save it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from flwr_regs.server.round import Round
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel

LOG = logging.getLogger("flwr")


def name_losses(this_round: Round, trained: Collection[int]) -> None:
    """Name the clients of a round that lost what they kept; `trained` are those that trained before.

    Losses of earlier attempts at the round are in it already, and stay.
    """

    def who(key: str) -> list[int]:
        return sorted(p for p, reply in this_round.came.items() if reply.says(key))

    anew = {p for p in who(keys.FRESH_KEY) if p in this_round.used and p in trained}
    this_round.lost_private = sorted({*this_round.lost_private, *anew})
    this_round.lost_state = sorted({*this_round.lost_state, *who(keys.LOST_KEY)})
    if this_round.lost_state:
        LOG.warning(
            "clients %s have lost their state and began anew without", this_round.lost_state
        )
    if ahead := who(keys.AHEAD_KEY):
        this_round.events["state_ahead"] = ahead
        LOG.warning("clients %s keep what they have of rounds after this one", ahead)
    if unsaved := who(keys.UNSAVED_KEY):
        this_round.events["not_saved"] = unsaved
        LOG.warning("clients %s could not save what they keep", unsaved)
    if this_round.lost_private:
        LOG.warning(
            "clients %s have lost their private entries and began anew with their model's own",
            this_round.lost_private,
        )


def lost_before(
    came: Mapping[int, Parcel], trained: Collection[int], used: Collection[int]
) -> dict[str, list[int]]:
    """Name the clients that evaluate without what they kept, as entries of the history.

    `trained` are the clients that had private entries, `used` those that had state.
    """
    kinds = (("lost_private", keys.FRESH_KEY, trained), ("lost_state", keys.LOST_KEY, used))
    lost = {
        what: sorted(p for p in had if p in came and came[p].says(key)) for what, key, had in kinds
    }
    for what, clients in lost.items():
        if clients:
            LOG.warning("clients %s evaluate without what they kept (%s)", clients, what)
    return {what: clients for what, clients in lost.items() if clients}
