"""Which clients make a step over all of them fail."""

from __future__ import annotations

from collections.abc import Callable, Collection

Fails = Callable[[list[int]], str]
"""Returns why a step over some clients fails, or ""."""


def culprits(pids: Collection[int], fails: Fails) -> dict[int, str]:
    """Return which clients make a step over all of them fail, and why; none if it fails without any client.

    A culprit fails alone, or the others do not fail without it. Of n clients, `fails` looks at each alone
    once, and at O(log n) further groups for each culprit that does not fail alone.
    """
    everyone = list(pids)
    if not fails(everyone):
        return {}
    alone = {p: why for p in everyone if (why := fails([p]))}
    if len(alone) == len(everyone):  # perhaps it needs several clients
        alone = {}
    rest = [p for p in everyone if p not in alone]
    found = alone | (_to_leave_out([], rest, fails) if fails(rest) else {})
    return found if len(found) < len(everyone) else {}


def _to_leave_out(good: list[int], suspects: list[int], fails: Fails) -> dict[int, str]:
    """Return those of the suspects with whom the `good` ones fail, and why; some of them do.

    They are halved again and again. A half that does not fail counts as good, the larger one first.
    """
    if len(suspects) == 1:
        return {suspects[0]: fails([*good, *suspects])}
    second, first = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
    first_fails = fails([*good, *first])
    if first_fails and not fails([*good, *second]):
        first, second, first_fails = second, first, ""
    found = _to_leave_out(good, first, fails) if first_fails else {}
    good = [*good, *(p for p in first if p not in found)]
    if fails([*good, *second]):
        found |= _to_leave_out(good, second, fails)
    return found
