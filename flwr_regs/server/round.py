"""A round as a value: its cohort, messages and checked replies, which were used, and why others not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from flwr_regs.server.failures import Passing, Reasons, name_failures
from flwr_regs.term import Slot
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel

ATTEMPT = (
    *("failed", "cohort", "failures", "late", "replies", "seconds"),
    *("bytes_down", "bytes_up", "bytes_ahead"),
)
"""What the history keeps of an attempt that failed."""
ENTRY = (
    *("population", "cohort", "lr", "bytes_down", "bytes_up", "bytes_probe_down", "bytes_probe_up"),
    *("bytes_ahead", "failures", "steps", "inactive", "incomplete", "seconds", "train_metrics"),
)
"""What the history has of a round as it is here."""


class RoundFailed(RuntimeError, Passing):
    """A round had too few usable replies, or diverged; the global model stays as it was before."""


class TooFewReplies(RoundFailed):
    """A round had too few usable replies; another attempt may have enough (`retries`)."""


class NoMajority(TooFewReplies):
    """The clients disagree, equally many each way: nobody knows which are right. The run goes on."""


UNDECIDED = "the clients disagree, equally many each way, on what they train, tie or freeze"


class Snapshots:
    """What rounds change in a part of a training: the attributes that `kept` names.

    For checkpoints, and to go back to after a round that failed.
    """

    kept: ClassVar[tuple[str, ...]]

    def snapshot(self) -> dict[str, Any]:
        """Return what it keeps, as plain values; later rounds do not change them."""
        return {name: copy(getattr(self, name)) for name in self.kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        vars(self).update({name: state[name] for name in self.kept})


def losses(replies: Mapping[int, Parcel]) -> dict[str, list[int]]:
    """Return the clients that have lost private entries, and those that have lost slots of terms."""
    words = {"private": keys.LOST_PRIVATE, "state": keys.LOST_STATE}
    return {what: sorted(p for p, r in replies.items() if r.says(w)) for what, w in words.items()}


Model = Mapping[str, np.ndarray]
"""Arrays by name."""


@dataclass(frozen=True)
class Reply:
    """One client's usable reply.

    Attributes
    ----------
    arrays : mapping
        ``v_k`` by name; an array that is neither here nor in `delta` equals that of ``w_t``.
    uploads : Slot
        The terms' uploads by term name; those of a term that folds are decoded when they are read.
    metrics : mapping
    num_examples : float
        ``n_k``.
    delta : mapping
        ``v_k − w_t`` of the arrays that were sent as differences.
    steps : tuple or None
        ``s_k`` and E, the local steps taken and planned; None if the client does not report them.
    buffers : frozenset of str
        The arrays that it does not train.
    tied : mapping
        Tied weights, other name -> trained name.
    frozen : str
        The digest of the frozen parameters that only the clients hold; "" if it says none.
    coded : callable, optional
        Returns `delta`, which is then empty: :attr:`open` returns the reply with it.
    turns : int
        How many trainings of the client it is the mean of.
    """

    arrays: Model
    uploads: Slot
    metrics: Any
    num_examples: float
    delta: Model = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    buffers: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)
    frozen: str = ""
    coded: Callable[[], Model] | None = None
    turns: int = 1

    @property
    def open(self) -> Reply:
        """The reply with its update decoded, which takes a model's memory as long as it is held."""
        return self if self.coded is None else replace(self, delta=self.coded(), coded=None)


Numbers = Mapping[int, float]
Replied = Mapping[int, Reply]
Slots = Mapping[int, Slot]
"""By partition id; slots are by term name, too."""


@dataclass
class Round:
    """One round, filled in as it runs.

    Attributes
    ----------
    number, population : int
        The round t, from 1; how many clients its cohort was drawn from.
    cohort, asked : list of int
        The clients that were drawn, by partition id; those of them that were asked to train.
    lr, config : float or None, dict
        The clients' learning rate η if the server knows it, and every client's config.
    bytes_down, bytes_up, bytes_probe_down, bytes_probe_up, bytes_ahead : dict of int to int
        Client -> bytes of the whole round, of its first exchange, and of a model sent ahead; None if the
        round has no such exchange.
    answers : dict of int to Slot
        Client -> what the terms sent it in the first exchange, by term name.
    came : dict of int to Parcel
        Client -> its reply as it arrived.
    received, used : dict of int to Reply
        Client -> its checked reply; those that the aggregator gets.
    failures : dict of int to str
        Client -> why it has no usable reply.
    late : list of int
        Those of them that had not replied at the deadline.
    steps, inactive, incomplete : dict of int to int, list of int, list of int
        Client -> local steps taken; clients that took none; clients that took some but not all.
    lost : dict of str to list of int
        Clients that trained before, but began anew with their private entries (``"private"``), or without
        their slots (``"state"``).
    seconds, events, train_metrics, examples_processed : dict, dict, dict, int
        Seconds by phase; entries that few rounds have (a shift of the population, epsilon, …); the clients'
        mean metrics, None until the round has succeeded; their examples, repeats counted.
    """

    number: int
    population: int = 0
    cohort: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    lr: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    bytes_down: dict[int, int] = field(default_factory=dict)
    bytes_up: dict[int, int] = field(default_factory=dict)
    bytes_probe_down: dict[int, int] | None = None
    bytes_probe_up: dict[int, int] | None = None
    bytes_ahead: dict[int, int] | None = None
    answers: Slots = field(default_factory=dict)
    came: Mapping[int, Parcel] = field(default_factory=dict)
    received: dict[int, Reply] = field(default_factory=dict)
    used: dict[int, Reply] = field(default_factory=dict)
    failures: Reasons = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    inactive: list[int] = field(default_factory=list)
    incomplete: list[int] = field(default_factory=list)
    lost: dict[str, list[int]] = field(default_factory=lambda: losses({}))
    seconds: dict[str, float] = field(default_factory=dict)
    events: dict[str, Any] = field(default_factory=dict)
    train_metrics: dict[str, Any] | None = None
    examples_processed: int = 0
    _clock: float = field(default_factory=time.monotonic)

    def lap(self, phase: str) -> None:
        """Add the seconds since the last lap, or the round's start, to those of `phase`."""
        began, self._clock = self._clock, time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._clock - began

    def lose(self, replies: Mapping[int, Parcel]) -> None:
        """Note which clients say that they have lost what they kept; losses of earlier attempts stay."""
        lost = losses(replies)
        self.lost = {what: sorted({*self.lost[what], *lost[what]}) for what in lost}

    def continue_from(self, failed: dict[str, Any]) -> None:
        """Note the earlier attempts at this round; `failed` is the last one's entry of the history."""
        self.lost = {what: failed[f"lost_{what}"] for what in self.lost}
        attempt = {k: failed[k] for k in ATTEMPT if k in failed}
        self.events["attempts"] = [*failed.get("attempts", []), attempt]

    @property
    def too_few(self) -> type[TooFewReplies]:
        """The error of too few replies: NoMajority if the clients disagree so that none could be used."""
        return NoMajority if UNDECIDED in self.failures.values() else TooFewReplies

    def check_enough(self, least: int, method: str) -> None:
        """Raise TooFewReplies if fewer than `least` replies are used; say why the others are not."""
        if len(self.used) >= least:
            return
        why = [name_failures(self.failures)] if self.failures else []
        why += [f"inactive: {self.inactive}"] if self.inactive else []
        why += [f"incomplete: {self.incomplete}"] if self.incomplete else []
        few = f"{len(self.used)} usable replies from a cohort of {len(self.cohort)}, needed {least}"
        raise self.too_few(
            f"round {self.number} of {method}: {few}" + ": " * bool(why) + "; ".join(why)
        )

    def entry(self) -> dict[str, Any]:
        """Return the round's entry of the history: plain numbers, texts and lists."""
        entry: dict[str, Any] = {
            "round": self.number,
            **{name: getattr(self, name) for name in ENTRY},
            **self.events,
            "late": sorted(self.late) or None,
            "replies": sorted(self.used),
            **{f"lost_{what}": clients for what, clients in self.lost.items()},
            "examples_processed": None if self.train_metrics is None else self.examples_processed,
        }
        return {key: value for key, value in entry.items() if value is not None}
