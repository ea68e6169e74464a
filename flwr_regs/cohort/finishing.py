"""The end of a stack's round: the terms' `finish`, for all members at once if possible. Plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.train.batches import mapped, to_device
from flwr_regs.cohort.data_functions import over_data
from flwr_regs.cohort.member_view import AsksFor, Member, View, joined
from flwr_regs.term import Arrays, ClientContext, Slot

Slots = Slot | list[Slot]
"""The members' slots: one whose entries have a first axis over them, or a list where they are not alike."""
Ended = tuple[Arrays, Slots, Slots]
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
    asked = ""  # most hooks need no data; some fail under vmap, or have an error of their own
    for _ in range(2):
        try:
            return _under_vmap(view, held, members, delta, asked)
        except AsksFor as error:
            asked = error.name
        except Exception:
            break
    return _each(view, held, members, delta)


def _under_vmap(
    view: View, held: Held, members: Sequence[Member], delta: Arrays, asked: str
) -> Ended:
    """Run the terms' `finish` under vmap; if it has `asked` for one, with functions over the data."""
    changed = False

    def end(delta: Arrays, told: dict[str, Any], functions: Mapping[str, Any] | None = None) -> Any:
        nonlocal changed
        sent, upload, kept = view.shared.term.finish(delta, view.context(told, **(functions or {})))
        changed = sent is not delta
        return sent, upload, kept

    given = delta, held.told
    with torch.no_grad():
        if asked == "train":
            plans = [m.plan for m in members]
            entries = held.entries, held.at_start
            ended = over_data(view, plans, *entries, given, end, few=True, training=True)
        elif asked:
            passes = [m.plan.one_pass() for m in members]
            ended = over_data(view, passes, held.entries, held.at_start, given, end)
        else:
            ended = view.vmapped(end)(*given)
    sent, upload, kept = ended
    return sent if changed else delta, upload, kept


def _each(view: View, held: Held, members: Sequence[Member], delta: Arrays) -> Ended:
    """Run the terms' `finish` client by client, with the functions over each client's data."""
    sent, uploads, slots, changed = list[Arrays](), list[Slot](), list[Slot](), False
    for row, member in enumerate(members):
        given = {n: d[row] for n, d in delta.items()}
        one, upload, kept = view.shared.term.finish(given, _context_of(view, held, member, row))
        changed |= one is not given
        sent.append(one)
        uploads.append(upload)
        slots.append(kept)
    stacked = {n: torch.stack([one[n] for one in sent]) for n in delta}
    return stacked if changed else delta, uploads, slots


def _context_of(view: View, held: Held, member: Member, row: int) -> ClientContext:
    """Return a member's context behind its steps; the model then holds the member's values."""
    shared, counts = view.shared, held.told.get("counts")
    torch.set_rng_state(member.plan.after)
    _fill(
        shared.model, {**view.rest, **view.start, **{n: t[row] for n, t in held.at_start.items()}}
    )
    data = member.plan.data
    measures = Measures(shared.model, data, shared.task, shared.device, shared.classifier)
    taken = len(member.plan)
    ctx = measures.context(
        {n: w.clone() for n, w in view.start.items()},
        shared.lr,
        num_steps=taken,
        planned_steps=member.planned_steps,
        budget_steps=taken,
        momentum=view.momentum,
        broadcast=joined(view.received, to_device(member.broadcast, shared.device)),
        client=to_device({t: dict(slot) for t, slot in member.client.items()}, shared.device),
        label_counts=None if counts is None else view.of_every_class(counts[row]),
        client_id=member.client_id,
        batch_size=view.batch_size,
        config=shared.config,
        optimizer_state={key: t[row] for key, t in held.told.get("optimizer", {}).items()},
    )
    _fill(shared.model, {n: t[row] for n, t in held.entries.items()})
    again = partial(member.plan.again, shared.device)
    return replace(ctx, train=partial(measures.train, ctx, again))


@torch.no_grad()
def _fill(model: nn.Module, values: Arrays) -> None:
    """Write values into the model."""
    entries = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for n, v in values.items():
        entries[n].copy_(v)
