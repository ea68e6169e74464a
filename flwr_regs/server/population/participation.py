"""Incomplete, inactive, arriving and departing clients (EFL, Secs. 3.1 and 4)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from statistics import median_low

from flwr_regs.server.options import Options
from flwr_regs.server.round import Round, Snapshots

LOG = logging.getLogger("flwr")


@dataclass
class Participation(Snapshots):
    """The clients of a training, and how often each was inactive so far.

    Parameters
    ----------
    options : Options
        `incomplete`, `drop_inactive` and `restart_lr`. By `drop_inactive`, the constant C/J of Eq. 9, a
        client is dropped once it was inactive in more than the share ``drop_inactive / (T E)`` of its
        turns, for T rounds of E steps. Where the clients plan different numbers of steps, E is their
        median: no single client's word counts.
    num_rounds : int
        T.
    """

    kept = ("turns", "inactive", "planned", "dropped", "members", "seen", "departed", "origin")

    options: Options
    num_rounds: int
    turns: dict[int, int] = field(default_factory=dict)
    inactive: dict[int, int] = field(default_factory=dict)
    planned: dict[int, int] = field(default_factory=dict)  # client -> steps that it planned last
    dropped: set[int] = field(default_factory=set)
    members: list[int] | None = None
    seen: set[int] = field(default_factory=set)  # clients that took part in a draw
    departed: set[int] = field(default_factory=set)  # clients that departed at least once
    origin: int = 1

    def remaining(self, members: list[int], this_round: Round) -> list[int]:
        """Return the clients that the cohort is drawn from; note drops and shifts in the round.

        A client is not dropped before its second turn, and comes back only if no other client is
        connected. The schedule restarts at a client's first arrival, first departure or drop, not each
        time that it comes and goes.
        """
        if (constant := self.options.drop_inactive) is not None:
            steps = median_low(self.planned.values()) if self.planned else 1
            self._drop(members, constant / (self.num_rounds * steps), this_round)
        left = [p for p in members if p not in self.dropped] if self.dropped else members
        if not left:
            LOG.warning("only dropped clients are connected: taking %s back", members)
            left, self.dropped = members, set()
        if self.members is not None and left != self.members:
            arrived, departed = set(left) - set(self.members), set(self.members) - set(left)
            shift = {"arrived": sorted(arrived), "departed": sorted(departed)}
            this_round.events["shift"] = shift
            if self.options.restart_lr and (arrived - self.seen or departed - self.departed):
                self.origin = this_round.number
            self.departed |= departed
        if left != self.members:
            self.seen |= set(left)
        self.members = left
        return left

    def _drop(self, members: list[int], limit: float, this_round: Round) -> None:
        """Drop the clients that were inactive in more than the share `limit` of their turns (Eq. 9)."""
        left = set(members) - self.dropped
        for pid, turns in self.turns.items():
            inactive = self.inactive.get(pid, 0)
            others = len(left) - (pid in left)
            if pid not in self.dropped and turns >= 2 and inactive / turns > limit and others:
                self.dropped.add(pid)
                left.discard(pid)
                this_round.events.setdefault("dropped_for_good", []).append(pid)
                idle = f"{inactive} of {turns} turns, more than {limit:.3g}"
                LOG.warning("client %d was inactive in %s: dropped (Eq. 9)", pid, idle)

    def schedule_round(self, number: int) -> int:
        """Return the round that the learning rate's schedule is called with."""
        return number - self.origin + 1

    def select(self, this_round: Round) -> None:
        """Choose the replies that are used; note in the round who was incomplete or inactive."""
        received = this_round.received
        steps = {pid: reply.steps for pid, reply in received.items() if reply.steps is not None}
        this_round.steps = {pid: taken for pid, (taken, _) in steps.items()}
        this_round.inactive = [p for p, (taken, _) in steps.items() if taken == 0]
        this_round.incomplete = [p for p, (taken, planned) in steps.items() if 0 < taken < planned]
        incomplete = this_round.incomplete if self.options.incomplete == "drop" else []
        unused = {*this_round.inactive, *incomplete}
        this_round.used = {pid: r for pid, r in received.items() if pid not in unused}

    def note(self, this_round: Round) -> None:
        """Count the turns of a round that moved the model.

        A client that took no step is inactive. For Eq. 9, so is one that did not reply, unless it was late:
        the deadline is the server's.
        """
        active = set(this_round.received) - set(this_round.inactive)
        for pid in set(this_round.cohort) - set(this_round.late):
            self.turns[pid] = self.turns.get(pid, 0) + 1
            self.inactive[pid] = self.inactive.get(pid, 0) + (pid not in active)
        self.planned |= {p: r.steps[1] for p, r in this_round.received.items() if r.steps}
