"""How the server reaches its clients: requests out, replies in. The flower folder implements it."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from flwr_regs.wire.parcel import Parcel

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

    `failures` says why each other client has no reply; `silent` are those that did not even send an error,
    `unsent` those that a user's code sent no message.
    """

    came: Mapping[int, Parcel]
    failures: Mapping[int, str] = field(default_factory=dict)
    silent: Collection[int] = ()
    unsent: Collection[int] = ()


class Network(Protocol):
    """The clients as the server sees them."""

    def nodes(self) -> Collection[int]:
        """Return the ids of the nodes that are connected now."""

    def ask(self, request: Request, timeout: float | None = None) -> Replies:
        """Send a request and wait for its replies, at most `timeout` seconds (None: the network's own)."""


Course = Generator[Sequence[Request], Sequence[Replies], T]
"""Work that pauses once for the clients: it yields requests, receives the replies, and returns a T."""
