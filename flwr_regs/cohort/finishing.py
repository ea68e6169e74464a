"""The end of a stack's round: the terms' `finish`, for all members at once if possible. Plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flwr_regs.client.train.batches import mapped
from flwr_regs.cohort.data_functions import over_data
from flwr_regs.cohort.member_view import AsksFor, Member, View
from flwr_regs.term import Arrays, Slot

Ended = tuple[Arrays, Slot, Slot]
"""What `finish` returns: the members' updates, uploads and kept slots."""


@dataclass(frozen=True)
class Held:
    """What the members hold; the first axis of every tensor is that of the members.

    Attributes
    ----------
    values : Arrays
        Trained parameters.
    buffers, private : Arrays
        Buffers, and other entries that are not trained, of which some are a member's own.
    at_start : Arrays
        The model's entries at the round's start beside what terms see of them.
    told : dict
        Slots, ids, label counts, and the numbers of steps that differ; at the end, if a term `Carries`,
        the state of the optimiser.
    """

    values: Arrays
    buffers: Arrays
    private: Arrays
    at_start: Arrays
    told: dict[str, Any]

    def rows(self, some: slice | Tensor) -> dict[str, Any]:
        """Return what some members hold beside trained parameters: views, of a slice."""
        whole = {
            "buffers": self.buffers,
            "told": self.told,
            "private": self.private,
            "at_start": self.at_start,
        }
        return mapped(whole, lambda t: t[some])  # type: ignore[no-any-return]

    @property
    def entries(self) -> Arrays:
        """All that the members' models now hold."""
        return {**self.values, **self.buffers, **self.private}


def finish(view: View, held: Held, members: Sequence[Member], delta: Arrays) -> Ended:
    """Run the terms' `finish` for all members; the updates are `delta` itself if no term changes it."""
    changed = False

    def end(delta: Arrays, told: dict[str, Any], functions: Mapping[str, Any] | None = None) -> Any:
        nonlocal changed
        sent, upload, kept = view.shared.term.finish(delta, view.context(told, **(functions or {})))
        changed = sent is not delta
        return sent, upload, kept

    given, entries = (delta, held.told), (held.entries, held.at_start)
    with torch.no_grad():
        try:  # most hooks need no data
            ended = view.vmapped(end)(*given)
        except AsksFor as asked:
            training = asked.name == "train"
            plans = [m.plan if training else m.plan.one_pass() for m in members]
            ended = over_data(view, plans, *entries, given, end, training)
    sent, upload, kept = ended
    return sent if changed else delta, upload, kept
