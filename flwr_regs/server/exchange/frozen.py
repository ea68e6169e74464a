"""What no client trains, on the server: it stays out of the messages, and goes once to who lacks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from flwr_regs.server.failures import read_each
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays
from flwr_regs.wire.frozen import frozen_digest, read_said
from flwr_regs.wire.parcel import Parcel, Record

ASK_ABOVE = 2**18
"""Bytes of a model. To send a smaller one once costs less than to ask first what of it is frozen."""
MOST_SENT = 64 * 2**20
"""Bytes of frozen parameters that a client may be sent."""


@dataclass(frozen=True)
class Frozen:
    """The parameters that no client trains.

    Attributes
    ----------
    names : frozenset of str
    arrays : NDArrays
        Their values; empty if `initial_arrays` lacks them, and only the clients have them.
    said : str
        The digest that the clients agree on; counts where the server has no values.
    """

    names: frozenset[str] = frozenset()
    arrays: NDArrays = field(default_factory=dict)
    said: str = ""

    @cached_property
    def digest(self) -> str:
        """The digest that a client's own frozen parameters must have; "" if none are frozen."""
        return frozen_digest(self.arrays) if self.arrays else self.said

    @cached_property
    def record(self) -> Record:
        """The values, for a client that holds others."""
        return Record(self.arrays)

    def refusal(self) -> str | None:
        """Return why a client that holds other values cannot be sent these; None if it can."""
        if not self.names:
            return "it holds parameters frozen that the others train"
        what = "it holds other frozen parameters than the others"
        cure = "build its model from the same pretrained weights"
        if not self.arrays:
            return f"{what}, and initial_arrays lacks them, so that the server cannot send them: {cure}"
        size = sum(a.nbytes for a in self.arrays.values())
        if size > MOST_SENT:
            return (
                f"{what}; they are {size / 2**20:,.1f} MiB, and at most {MOST_SENT / 2**20:.0f} MiB of "
                f"frozen parameters are sent: {cure}"
            )
        return None


def agree_on_frozen(
    said: Mapping[int, tuple[frozenset[str], str]], model: NDArrays
) -> tuple[Frozen, dict[int, str]]:
    """Return (what the clients hold frozen, client -> why for clients that hold something else).

    `said` is what at least one client says. The majority decides, or the lowest partition id. Clients
    compare values with `model`; where it lacks the frozen parameters, they must agree among themselves.
    """
    known = {p: (names, "" if names <= set(model) else d) for p, (names, d) in sorted(said.items())}
    ((names, digest), _), *_ = Counter(known.values()).most_common(1)
    frozen = Frozen(names, {n: model[n] for n in sorted(names & set(model))}, digest)
    why = frozen.refusal() or "it holds other parameters frozen than the others"
    return frozen, {p: why for p, mine in known.items() if mine != (names, digest)}


def out_of_sync(came: Mapping[int, Parcel]) -> dict[int, Parcel]:
    """Return the replies that say that the client lacks what its message builds on."""
    return {p: reply for p, reply in came.items() if reply.says(keys.OUT_OF_SYNC_KEY)}


def frozen_of(came: Mapping[int, Parcel], model: NDArrays) -> Frozen | None:
    """Return what the clients hold frozen, from the replies of those that were asked; None if none says.

    A client whose code fails when it is asked says nothing, and so does a client of other code.
    """
    asked = {p: reply for p, reply in came.items() if keys.FROZEN_KEY in reply.config}
    said, _ = read_each(asked, lambda _, reply: read_said(reply.config))  # others then differ
    return agree_on_frozen(said, model)[0] if said else None


def differing(came: Mapping[int, Parcel], frozen: Frozen | None) -> list[int]:
    """Return the clients of out-of-sync replies whose frozen parameters differ from the others'."""
    mine = {p: reply.config.get(keys.FROZEN_DIGEST_KEY) for p, reply in came.items()}
    return [p for p, d in mine.items() if frozen and d is not None and d != frozen.digest]
