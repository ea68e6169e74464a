"""The global model on the test sets of many clients at once. Plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from flwr_regs.client import memory as memories
from flwr_regs.client.measure.accuracy import classifies
from flwr_regs.client.member import evaluated, reply_entries
from flwr_regs.client.serving import Client
from flwr_regs.client.train.batches import resolve_device, tensors
from flwr_regs.client.train.task import uncompiled
from flwr_regs.cohort.batch_plan import Batches, Plan, draw, order_of
from flwr_regs.cohort.member_view import Asked
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel

DATA = 2**26
"""Bytes of the clients' batches that go through the model at once."""


def evaluate(asked: Sequence[Asked]) -> dict[int, Parcel]:
    """Return the replies, by partition id, of those clients that can evaluate at once.

    They share the model as an object, as `Clients` do, evaluate the global model alone, and go through
    plain test data in order. The others wait.
    """
    groups: dict[Any, list[tuple[Asked, Plan]]] = {}
    together: dict[Any, bool] = {}
    for one in asked:
        client, message = one.client, one.message
        if client.eval_data is None or "personalise" in message.config or client.identity.private:
            continue
        pairs = client.task.pairs(client.eval_data)
        order = order_of(pairs)
        if order is None or order.shuffle or not order.sizes:
            continue
        plan = draw(pairs, 0, len(order.sizes), order)
        of_all = id(client.model), id(client.task), id(message.records[keys.ARRAYS])
        groups.setdefault((of_all, order.kind, plan.sizes), []).append((one, plan))
    replies: dict[int, Parcel] = {}
    for (of_all, *_), group in groups.items():
        first = group[0][0]
        model = uncompiled(first.client.model)
        if len(group) > 1 and of_all not in together:
            term, *_ = evaluated(first.message, first.memory, model, first.client.identity)
            own_models = term.personalising or term.private(list(model.state_dict()))
            together = {of_all: not own_models}
        if not together.get(of_all):
            continue
        size = sum(t.nbytes for t in tensors(group[0][1].batch(0)))
        most = max(DATA // max(size, 1), 1)
        for at in range(0, len(group), most):
            some = group[at : at + most]
            scores = _scores(first.client, model, [plan for _, plan in some])
            for (one, plan), (loss, right) in zip(some, scores, strict=True):
                metrics = {"num-examples": sum(plan.sizes), "loss": loss}
                if right is not None:
                    metrics["accuracy"] = right / sum(plan.sizes)
                lost = memories.latest(one.memory, one.message.config).lost
                entries = reply_entries(one.message.config, [f"lost {what}" for what in lost])
                replies[one.pid] = Parcel({}, entries, metrics)
    return replies


@torch.no_grad()
def _scores(
    client: Client, model: nn.Module, plans: Sequence[Plan]
) -> list[tuple[float, int | None]]:
    """Return each client's mean loss, and how many outputs are right; None if these are no classes."""
    device, task, sorts = resolve_device(client.device), client.task, True
    model.to(device).eval()
    batches = Batches(plans, device)
    loss = torch.zeros(len(plans), dtype=torch.float64, device=device)
    right = torch.zeros(len(plans), dtype=torch.int64, device=device)
    for step, size in enumerate(plans[0].sizes):
        batch = batches.of(step, range(len(plans)))

        def one(leaves: list[Tensor], batch: Any = batch) -> tuple[Tensor, Tensor]:
            nonlocal sorts
            inputs, targets = batch.rebuilt(leaves)
            output = task.output(model, inputs, targets)
            sorts &= classifies(output, targets)
            hits = (output.argmax(dim=1) == targets).sum() if sorts else torch.zeros(())
            return task.loss(output, targets), hits

        losses, hits = vmap(one)(batch.leaves)
        loss += losses.double() * size
        right += hits.long()
    each = (loss / sum(plans[0].sizes)).tolist()
    return list(zip(each, right.tolist() if sorts else [None] * len(plans), strict=True))
