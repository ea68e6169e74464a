"""What `finish` may ask of a client's whole data, for the clients of a stack at once. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch.utils._pytree import tree_map

from flwr_regs.client.measure.features import evaluating
from flwr_regs.client.measure.fisher import MEMORY, sample_loss
from flwr_regs.client.measure.fisher_layers import Layers, find_layers
from flwr_regs.client.train.batches import mapped, tensors
from flwr_regs.cohort.batch_plan import Batch, Batches, CannotStack, Plan
from flwr_regs.cohort.member_view import MEASURED, MemberTask, OneMember, View
from flwr_regs.term import Arrays

DATA = 2**26
"""Bytes of the members' data that are gathered at once."""


def over_data(
    view: View,
    passes: Sequence[Plan],
    row: dict[str, Any],
    one: Callable[..., Any],
    given: tuple[Any, ...] = (),
    training: bool = False,
) -> Any:
    """Return what ``one(*given, told, **functions)`` is for each member, stacked.

    Parameters
    ----------
    view : View
    passes : sequence of Plan
        The members' data, each as one pass.
    row : dict
        What is the members' own, with all that their models hold, stacked.
    one : callable
    given : tuple
        Nested dicts of stacked tensors.
    training : bool
        `passes` are the batches of the round's steps, for `train` alone.
    """
    shared, rows = view.shared, len(passes)
    if not training:  # Fisher information looks for linear layers
        view = replace(view, shared=replace(shared, precision=None), as_products=False)
    rest = {n: v.expand(rows, *v.shape) for n, v in view.rest.items()}
    row = {**row, "held": {**rest, **row["held"]}}
    groups: dict[Any, list[int]] = {}
    for at, plan in enumerate(passes):
        groups.setdefault((plan.kind, plan.forms), []).append(at)
    parts: list[Any] = []
    order: list[int] = []
    for members in groups.values():
        first = passes[members[0]]
        size = sum(t.nbytes for i in range(len(first)) for t in tensors(first.batch(i)))
        most = max(DATA // max(size, 1), 1)
        for some in (members[i : i + most] for i in range(0, len(members), most)):
            chosen = [passes[at] for at in some]
            gathered = Batches(chosen, shared.device)
            batches = [gathered.of(i, range(len(chosen))) for i in range(len(first))]
            taken = mapped((row, given), itemgetter(some))
            how: dict[str, Any] = {"memory": MEMORY // len(some)}
            if not training:
                first_held = {n: t[0] for n, t in taken[0]["held"].items()}
                how["layers"] = _layers(view, batches[0], first_held)

            def member(leaves: Any, taken: Any, how: Any = how, batches: Any = batches) -> Any:
                own, given = taken
                pairs = [b.rebuilt(parts) for b, parts in zip(batches, leaves, strict=True)]
                measured = OneMember(view, own, pairs, **how)
                functions = {name: getattr(measured, name) for name in MEASURED}
                if training:
                    ctx = view.context(own["told"], num_steps=len(pairs))
                    functions = {"train": partial(measured.train, ctx, partial(_again, pairs))}
                    functions["num_steps"] = len(pairs)
                return one(*given, own["told"], **functions)

            parts.append(view.vmapped(member)([b.leaves for b in batches], taken))
            order += some
    if len(parts) == 1 and order == sorted(order):
        return parts[0]
    back = torch.tensor(order, device=shared.device).argsort()
    return tree_map(lambda *rows: torch.cat(rows)[back], *parts)


def _layers(view: View, batch: Batch, held: Arrays) -> Layers:
    """Return the layers that :func:`.fisher_layers.find_layers` finds in a member that holds `held`."""
    model, task = view.shared.model, MemberTask(**vars(view.shared.task), view=view, held=held)
    first = batch.rebuilt([t[0] for t in batch.leaves])
    values = {n: held[n] for n, p in model.named_parameters() if p.requires_grad}
    sample = [t[0, 0] for t in batch.leaves]
    with evaluating(model):
        return find_layers(model, partial(sample_loss, model, task, {}, first), values, sample)


def _again(pairs: Sequence[Any], steps: int) -> Iterator[tuple[Any, Any]]:
    if steps > len(pairs):
        raise CannotStack("a term trains for more steps than the round has")
    return islice(pairs, steps)
