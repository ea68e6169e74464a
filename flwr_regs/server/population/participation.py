"""Incomplete, inactive, arriving and departing clients (EFL, Secs. 3.1 and 4)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from statistics import median_low
from typing import Any

from flwr_regs.server.round import Round

LOG = logging.getLogger("flwr")


class Participation:
    """The clients of a training, and how often each was inactive so far.

    Parameters
    ----------
    incomplete : {"average", "scale", "drop"}
    drop_inactive : float or None
        The constant C/J of Eq. 9: a client is dropped once it was inactive in more than the share
        ``drop_inactive / (T E)`` of its turns, for T rounds of E steps. Where the clients plan different
        numbers of steps, E is their median: no single client's word counts.
    restart_lr : bool
        Restart the learning rate's schedule when the clients change (Sec. 4.4).
    num_rounds : int
        T.
    """

    def __init__(
        self, incomplete: str, drop_inactive: float | None, restart_lr: bool, num_rounds: int
    ) -> None:
        self._incomplete = incomplete
        self._bound = drop_inactive
        self._restart = restart_lr
        self._num_rounds = num_rounds
        self._turns: dict[int, int] = {}
        self._inactive: dict[int, int] = {}
        self._planned: dict[int, int] = {}  # client -> the steps that it planned last
        self._dropped: set[int] = set()
        self._members: list[int] | None = None
        self._seen: set[int] = set()  # clients that took part in a draw
        self._departed: set[int] = set()  # clients that departed at least once
        self._origin = 1

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {
            "turns": dict(self._turns),
            "inactive": dict(self._inactive),
            "planned": dict(self._planned),
            "dropped": set(self._dropped),
            "members": self._members,
            "seen": set(self._seen),
            "departed": set(self._departed),
            "origin": self._origin,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        self._turns, self._inactive = state["turns"], state["inactive"]
        self._planned, self._origin = state["planned"], state["origin"]
        self._dropped, self._members = state["dropped"], state["members"]
        self._seen, self._departed = state["seen"], state["departed"]

    def remaining(self, members: list[int], this_round: Round) -> list[int]:
        """Return the clients that the cohort is drawn from; note drops and shifts in the round.

        A client is not dropped before its second turn, and comes back only if no other client is
        connected. The schedule restarts at a client's first arrival, first departure or drop, not each
        time that it comes and goes.
        """
        if self._bound is not None:
            steps = median_low(self._planned.values()) if self._planned else 1
            self._drop(members, self._bound / (self._num_rounds * steps), this_round)
        left = [p for p in members if p not in self._dropped] if self._dropped else members
        if not left:
            LOG.warning("only dropped clients are connected: taking %s back", members)
            left, self._dropped = members, set()
        if self._members is not None and left != self._members:
            arrived = sorted(set(left) - set(self._members))
            departed = sorted(set(self._members) - set(left))
            this_round.events["shift"] = {"arrived": arrived, "departed": departed}
            if self._restart and (set(arrived) - self._seen or set(departed) - self._departed):
                self._origin = this_round.number
            self._departed |= set(departed)
        if left != self._members:
            self._seen |= set(left)
        self._members = left
        return left

    def _drop(self, members: list[int], limit: float, this_round: Round) -> None:
        """Drop the clients that were inactive in more than the share `limit` of their turns (Eq. 9)."""
        left = set(members) - self._dropped
        for pid, turns in self._turns.items():
            inactive = self._inactive.get(pid, 0)
            others = len(left) - (pid in left)
            if pid not in self._dropped and turns >= 2 and inactive / turns > limit and others:
                self._dropped.add(pid)
                left.discard(pid)
                this_round.events.setdefault("dropped_for_good", []).append(pid)
                LOG.warning(
                    "client %d was inactive in %d of %d turns, more than %.3g: dropped (Eq. 9)",
                    *(pid, inactive, turns, limit),
                )

    def schedule_round(self, number: int) -> int:
        """Return the round that the learning rate's schedule is called with."""
        return number - self._origin + 1

    def select(self, this_round: Round) -> None:
        """Choose the replies that are used; note in the round who was incomplete or inactive."""
        received = this_round.received
        steps = {pid: reply.steps for pid, reply in received.items() if reply.steps is not None}
        inactive = {pid for pid, (taken, _) in steps.items() if taken == 0}
        active = set(received) - inactive
        this_round.steps = {pid: taken for pid, (taken, _) in steps.items()}
        this_round.inactive = sorted(inactive)
        this_round.incomplete = sorted(
            p for p, (taken, planned) in steps.items() if 0 < taken < planned
        )
        unused = set(this_round.incomplete) if self._incomplete == "drop" else set()
        this_round.used = {pid: r for pid, r in received.items() if pid in active - unused}

    def note(self, this_round: Round) -> None:
        """Count the turns of a round that moved the model.

        A client that took no step is inactive. For Eq. 9, so is one that did not reply, unless it was late:
        the deadline is the server's.
        """
        active = set(this_round.received) - set(this_round.inactive)
        for pid in set(this_round.cohort) - set(this_round.late):
            self._turns[pid] = self._turns.get(pid, 0) + 1
            self._inactive[pid] = self._inactive.get(pid, 0) + (pid not in active)
        self._planned |= {
            p: r.steps[1] for p, r in this_round.received.items() if r.steps is not None
        }
