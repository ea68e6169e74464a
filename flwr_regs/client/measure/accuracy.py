"""A model's loss and accuracy on a client's data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flwr_regs.client.train.batches import Batches, batch_size, to_device
from flwr_regs.client.train.task import Task


@torch.no_grad()
def score(
    model: nn.Module, data: Batches, task: Task, device: torch.device
) -> tuple[float, int, dict[str, float]]:
    """Return (mean loss, examples, metrics) of a model on `data`; ValueError if that holds no batch.

    The metrics hold ``"accuracy"``, the share of correct arg-max, where the task is classification:
    outputs ``(n, classes)``, integer targets ``(n,)``.
    """
    model.to(device).eval()
    loss, correct, count, sorts = 0.0, 0, 0, True
    for inputs, targets in task.pairs(data):
        targets = to_device(targets, device)
        output = task.output(model, to_device(inputs, device), targets)
        size = batch_size(targets)
        loss += float(task.loss(output, targets)) * size
        count += size
        sorts &= classifies(output, targets)
        if sorts:
            correct += int((output.argmax(dim=1) == targets).sum())
    if count == 0:
        raise ValueError("the client has no evaluation data: eval_data holds no batch")
    return loss / count, count, {"accuracy": correct / count} if sorts else {}


def classifies(output: Any, targets: Any) -> bool:
    """Whether a batch's output and targets are those of a classification."""
    return (
        isinstance(output, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and output.ndim == 2
        and output.shape[1] > 1
        and targets.ndim == 1
        and not targets.is_floating_point()
    )
