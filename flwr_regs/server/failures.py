"""The clients that fail: found, noted with the reason, and named."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import groupby
from typing import TypeVar

from flwr_regs.wire.arrays import ProtocolError
from flwr_regs.wire.errors import described
from flwr_regs.wire.text import shown

S = TypeVar("S")
T = TypeVar("T")
Reasons = dict[int, str]
"""Partition id -> why."""
StepOf = Callable[[list[int]], T]
"""Makes something of some clients, by partition id."""

MOST_NAMED = 10
"""Ranges of clients, and errors, that a message names; the history has all."""


class Passing(Exception):
    """Names the clients behind it itself, or concerns all of them: nobody looks for others."""


class UnusableReplies(Passing):
    """Replies that a step over all of them cannot use, and why."""

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__(dict(why))
        self.why = dict(why)


def of_usable(pids: Collection[int], step: StepOf[T], what: str) -> T:
    """Return what `step` makes of the clients; raise UnusableReplies for its :func:`culprits`.

    What it raises goes on if no client is the cause, or if it is `Passing`.
    """
    try:
        return step(list(pids))
    except Passing:
        raise
    except Exception as error:
        if not (found := culprits(pids, step, what)):
            raise
        raise UnusableReplies(found) from error


def culprits(pids: Collection[int], step: StepOf[object], what: str) -> Reasons:
    """Return which clients make a step over all of them fail, and why; none if it fails without any client.

    A culprit fails alone, or the others do not fail without it. Of n clients, `step` takes each alone once,
    and O(log n) further groups for each culprit that does not fail alone.

    Parameters
    ----------
    pids : collection of int
    step : callable
        Does the step for some clients; raises if it fails. What is `Passing` is no failure.
    what : str
        Begins the reason; what was raised follows.
    """

    def fails(some: list[int]) -> str:
        try:
            with suppress(Passing):
                step(some)
        except Exception as error:
            return f"{what}: {described(error)}"
        return ""

    everyone = list(pids)
    if not fails(everyone):
        return {}
    alone = {p: why for p in everyone if (why := fails([p]))}
    alone = alone if len(alone) < len(everyone) else {}  # perhaps it needs several clients
    rest = [p for p in everyone if p not in alone]
    wrong = alone | (_to_leave_out([], rest, fails) if fails(rest) else {})
    return wrong if len(wrong) < len(everyone) else {}


def _to_leave_out(good: list[int], suspects: list[int], fails: StepOf[str]) -> Reasons:
    """Return those of the suspects with whom the `good` ones fail, and why; some of them do.

    They are halved again and again. A half that does not fail counts as good, the larger one first.
    """
    if len(suspects) == 1:
        return {suspects[0]: fails([*good, *suspects])}
    second, first = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
    first_fails = fails([*good, *first])
    if first_fails and not fails([*good, *second]):
        first, second, first_fails = second, first, ""
    wrong = _to_leave_out(good, first, fails) if first_fails else {}
    good = [*good, *(p for p in first if p not in wrong)]
    if fails([*good, *second]):
        wrong |= _to_leave_out(good, second, fails)
    return wrong


def read_each(came: Mapping[int, S], read: Callable[[int, S], T]) -> tuple[dict[int, T], Reasons]:
    """Return (what `read` makes of each reply, why it makes nothing of the others), in the order of ids.

    Here alone a client's reply becomes a value or a named failure. Whatever it makes `read` raise, also for
    want of memory or of stack, costs this client only.
    """
    values: dict[int, T] = {}
    failures: Reasons = {}
    for pid in sorted(came):
        try:
            values[pid] = read(pid, came[pid])
        except ProtocolError as error:
            failures[pid] = shown(error)
        except Exception as error:
            failures[pid] = shown(f"the reply of client {pid} cannot be read: {described(error)}")
    return values, failures


def name_failures(
    failures: Mapping[int, str], who: str = "client", ids: str = "partition", what: str = "failed"
) -> str:
    """Name the failed clients with their errors: each error once, on its own line if there are several.

    Errors that differ in the client's number alone are one.
    """
    by_reason: defaultdict[str, list[int]] = defaultdict(list)
    for pid, why in sorted(failures.items()):
        by_reason[re.sub(rf"\bof client {pid}\b", "of the client", why)].append(pid)
    groups = []
    for why, pids in list(by_reason.items())[:MOST_NAMED]:
        s = "s" * (len(pids) > 1)
        groups.append(f"{len(pids)} {who}{s} ({ids}{s} {_ranges(pids)}) {what}: {why}")
    if rest := list(by_reason.values())[MOST_NAMED:]:
        groups.append(f"{sum(map(len, rest))} more {who}s {what} with {len(rest)} other errors")
    return groups[0] if len(groups) == 1 else "".join(f"\n  {group}" for group in groups)


def _ranges(numbers: list[int]) -> str:
    """Return increasing numbers as a text: 0-2, 5, 7-9; at most `MOST_NAMED` ranges."""
    in_a_row = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in in_a_row]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:MOST_NAMED]]
    return ", ".join(texts) + ", …" * (len(runs) > MOST_NAMED)
