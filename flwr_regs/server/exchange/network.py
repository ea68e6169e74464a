"""How the server reaches its clients: requests out, replies in. The flower folder implements it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from flwr_regs.wire.arrays import ProtocolError
from flwr_regs.wire.errors import described
from flwr_regs.wire.parcel import Parcel
from flwr_regs.wire.text import shown

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """Messages of one kind, one for each client.

    Attributes
    ----------
    kind : str
        The message type: "train", "evaluate", or a query of ``flwr_regs.wire.keys``.
    parcels : mapping of int to Parcel
        Partition id -> content.
    nodes : mapping of int to int
        Partition id -> the node that serves it.
    """

    kind: str
    parcels: Mapping[int, Parcel]
    nodes: Mapping[int, int]


@dataclass(frozen=True)
class Replies:
    """The replies to one request, by partition id.

    `failures` says why each other client has no reply; `silent` are those that did not even send an error.
    """

    came: Mapping[int, Parcel]
    failures: Mapping[int, str] = field(default_factory=dict)
    silent: Collection[int] = ()


class Network(Protocol):
    """The clients as the server sees them."""

    def nodes(self) -> Collection[int]:
        """Return the ids of the nodes that are connected now."""
        ...

    def ask(self, request: Request, timeout: float | None = None) -> Replies:
        """Send a request and wait for its replies, at most `timeout` seconds (None: the network's own)."""
        ...


Course = Generator[Sequence[Request], Sequence[Replies], T]
"""Work that pauses once for the clients: it yields requests, receives the replies, and returns a T."""


def read_each(
    came: Mapping[int, S], read: Callable[[int, S], T]
) -> tuple[dict[int, T], dict[int, str]]:
    """Return (what `read` makes of each reply, why it makes nothing of the others), in the order of ids.

    Here alone a client's reply becomes a value or a named failure. Whatever it makes `read` raise, also for
    want of memory or of stack, costs this client only.
    """
    values: dict[int, T] = {}
    failures: dict[int, str] = {}
    for pid in sorted(came):
        try:
            values[pid] = read(pid, came[pid])
        except ProtocolError as error:
            failures[pid] = shown(error)
        except Exception as error:
            failures[pid] = shown(f"the reply of client {pid} cannot be read: {described(error)}")
    return values, failures


MOST_NAMED = 10
"""Clients, and errors, that a message names; the history has all."""


def name_failures(failures: Mapping[int, str], who: str = "clients", what: str = "failed") -> str:
    """Name the failed clients with their errors: each error once, on its own line if there are several."""
    by_reason: dict[str, list[int]] = {}
    for pid, why in sorted(failures.items()):
        by_reason.setdefault(why, []).append(pid)
    groups = []
    for why, pids in list(by_reason.items())[:MOST_NAMED]:
        more = f" and {len(pids) - MOST_NAMED} more" if len(pids) > MOST_NAMED else ""
        groups.append(f"{who} {pids[:MOST_NAMED]}{more} {what}: {why}")
    if rest := list(by_reason.values())[MOST_NAMED:]:
        groups.append(f"{sum(map(len, rest))} more {who} {what} with {len(rest)} other errors")
    return groups[0] if len(groups) == 1 else "".join(f"\n  {group}" for group in groups)
