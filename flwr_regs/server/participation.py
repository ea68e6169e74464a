"""Incomplete, inactive, arriving and departing clients (EFL, Secs. 3.1 and 4)."""

from __future__ import annotations

from collections.abc import Mapping
from logging import WARNING
from typing import Any

from flwr.common.logger import log

from flwr_regs.server.aggregation import Reply


class Participation:
    """Who is left in the objective, and since when it is what it is.

    Parameters
    ----------
    incomplete : {"average", "scale", "drop"}
    drop_inactive : float or None
        The constant C/J of Eq. 9: a client is dropped once the share of its turns in which it was
        inactive exceeds ``drop_inactive / (T E)``, T rounds of E steps.
    restart_lr : bool
        Count the learning rate's schedule anew from each shift of the objective (Sec. 4.4).
    """

    def __init__(self, incomplete: str, drop_inactive: float | None, restart_lr: bool) -> None:
        if incomplete not in ("average", "scale", "drop"):
            raise ValueError(f"incomplete must be 'average', 'scale' or 'drop', not {incomplete!r}")
        if drop_inactive is not None and not drop_inactive > 0:
            raise ValueError(f"drop_inactive must be positive or None, not {drop_inactive}")
        self.incomplete = incomplete
        self._bound = drop_inactive
        self._restart = restart_lr
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._turns: dict[int, int] = {}
        self._inactive: dict[int, int] = {}
        self._steps = 1  # E, the most that any client was asked for
        self._left: set[int] = set()
        self._members: list[int] | None = None
        self._seen: set[int] = set()  # who has been here
        self._gone: set[int] = set()  # who has been missing since
        self._origin = 1

    @property
    def drops(self) -> bool:
        """Whether often inactive clients are dropped."""
        return self._bound is not None

    def remaining(
        self, members: list[int], server_round: int, num_rounds: int, entry: dict[str, Any]
    ) -> list[int]:
        """Return the clients that cohorts are drawn from; note drops and shifts in the history.

        A client is dropped for good, never before its second turn, and taken back only if nobody else is
        there. The schedule restarts for what is new: a client's first arrival, its first departure or
        its drop, not for one that comes and goes.
        """
        if self._bound is not None:
            limit = self._bound / (num_rounds * self._steps)
            for pid, turns in self._turns.items():
                share = self._inactive.get(pid, 0) / turns
                stay = [p for p in members if p not in self._left and p != pid]
                if pid not in self._left and turns >= 2 and share > limit and stay:
                    self._left.add(pid)
                    entry.setdefault("dropped_for_good", []).append(pid)
                    log(
                        WARNING,
                        "client %d was inactive in %d of %d turns, more than %.3g: dropped (Eq. 9)",
                        pid,
                        self._inactive[pid],
                        turns,
                        limit,
                    )
        mine = [p for p in members if p not in self._left]
        if not mine:
            log(WARNING, "only dropped clients are here: taking %s back", members)
            mine, self._left = members, set()
        if self._members is not None and mine != self._members:
            arrived = sorted(set(mine) - set(self._members))
            departed = sorted(set(self._members) - set(mine))
            entry["shift"] = {"arrived": arrived, "departed": departed}
            if self._restart and (set(arrived) - self._seen or set(departed) - self._gone):
                self._origin = server_round
            self._gone |= set(departed)
        self._seen |= set(mine)
        self._members = mine
        return mine

    def schedule_round(self, server_round: int) -> int:
        """Return the round that the learning rate's schedule is asked for."""
        return server_round - self._origin + 1

    def usable(
        self, cohort: list[int], replies: Mapping[int, Reply], entry: dict[str, Any]
    ) -> dict[int, Reply]:
        """Return the replies that are averaged; note in the history what became of the others.

        A client that took no step is inactive; one that did not answer is so too, for Eq. 9.
        """
        steps = {pid: reply.steps for pid, reply in replies.items()}
        active = {pid for pid, (taken, _) in steps.items() if taken > 0}
        for pid in cohort:
            self._turns[pid] = self._turns.get(pid, 0) + 1
            self._inactive[pid] = self._inactive.get(pid, 0) + (pid not in active)
        self._steps = max([self._steps, *(planned for _, planned in steps.values())])
        entry["steps"] = {pid: taken for pid, (taken, _) in steps.items()}
        entry["inactive"] = sorted(set(replies) - active)
        late = {p for p in active if steps[p][0] < steps[p][1]}
        entry["incomplete"] = sorted(late)
        kept = active - late if self.incomplete == "drop" else active
        return {pid: reply for pid, reply in replies.items() if pid in kept}
