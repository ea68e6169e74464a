"""What is wrong with a client's data where torch refuses it, or where numbers are lost, and what helps."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from flwr_regs.client.train.batches import Pairs, batch_size, forked, tensors


def remedy(
    error: Exception | None, inputs: Any, output: Any, targets: Any, model: nn.Module, loss_fn: Any
) -> str:
    """Return what helps against an error of a forward pass (`output` is None) or a loss; "" if unknown."""
    if output is None and isinstance(inputs, Tensor):
        first = next(model.parameters(), None)
        if found := re.search(r"multiplied \(\d+x(\d+) and (\d+)x", str(error)):
            shape = tuple(inputs.shape[1:])
            return (
                f"an example has the shape {shape}: a linear layer of the model gets {found[1]} numbers, "
                f"but takes {found[2]}"
            )
        if "dtype" in str(error) and first is not None and inputs.dtype is not first.dtype:
            return f"the inputs are {inputs.dtype}, not {first.dtype}: give x.to({first.dtype})"
    if "more than 1 value per channel" in str(error):
        return (
            "a batch holds one example, and BatchNorm needs two in training: give the loader "
            "drop_last=True, or another batch_size"
        )
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor):
        return ""
    return wrong_kind(output, targets) or wrong_label(output, targets, loss_fn)


def wrong_kind(output: Tensor, targets: Tensor) -> str:
    """Say what cross-entropy refuses in the shape or the type of a batch's labels; "" if nothing."""
    if output.ndim < 2 or not output.is_floating_point():
        return ""
    shape = tuple(targets.shape)
    if targets.ndim == output.ndim and targets.shape[1:] == (1,) * (targets.ndim - 1):
        return f"the labels have the shape {shape}, expected ({shape[0]},): give y.squeeze(1)"
    if targets.shape == output.shape and not targets.is_floating_point():
        return f"the labels are one-hot integers of the shape {shape}: give y.argmax(1)"
    if targets.dtype not in (torch.int64, torch.uint8) and targets.ndim < output.ndim:
        return f"the labels are {targets.dtype}, expected torch.int64: give y.long()"
    return ""


def wrong_label(output: Tensor, targets: Tensor, loss_fn: Any) -> str:
    """Say which class label is none of the output's classes; "" if all are, or the loss ignores it."""
    if targets.is_floating_point() or not targets.ndim or output.ndim != targets.ndim + 1:
        return ""
    classes = output.shape[1]
    ignored = getattr(loss_fn, "ignore_index", -100)  # torch's default
    wrong = (((targets < 0) | (targets >= classes)) & (targets != ignored)).nonzero()
    if not len(wrong):
        return ""
    label = int(targets[tuple(wrong[0])])
    return (
        f"a label is {label}, but the model has {classes} outputs, for labels from 0 to {classes - 1}: "
        "number the classes from 0, or give the model more outputs"
    )


def are_probabilities(output: Any) -> bool:
    """Whether an output is what a softmax makes: cross-entropy takes what goes into one."""
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < 2:
        return False
    return bool((output >= 0).all()) and bool(((output.sum(1) - 1).abs() < 1e-4).all())


def is_cross_entropy(loss_fn: Any) -> bool:
    """Whether labels must be numbers of the output's classes."""
    return loss_fn is nn.functional.cross_entropy or type(loss_fn) is nn.CrossEntropyLoss


def not_finite(data: Pairs) -> str:
    """Say which training example holds NaN or infinity; "" if none does. torch's random state stays."""
    dataset: Any = getattr(data.source, "dataset", None)
    with forked():
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            each = ((f"example {i}", tensors(dataset[i])) for i in range(len(dataset)))
            return next((_lost(name) for name, parts in each if not are_finite(parts)), "")
        for number, (inputs, targets) in enumerate(data):
            if not are_finite(tensors([inputs, targets])):
                for i in range(batch_size(targets)):
                    if not are_finite([part[i] for part in tensors([inputs, targets])]):
                        return _lost(f"example {i} of batch {number}")
    return ""


def _lost(name: str) -> str:
    return f"{name} of train_data holds NaN or infinity: leave it out, or fill its gaps"


def are_finite(parts: list[Tensor]) -> bool:
    """Whether the dense floating-point tensors are finite."""
    dense = [t for t in parts if t.is_floating_point() and t.layout is torch.strided]
    return all(bool(t.isfinite().all()) for t in dense)


def awaits_gradient(p: Tensor) -> bool:
    """Whether an optimiser of Opacus has yet to make ``p.grad`` of single examples' gradients."""
    return getattr(p, "grad_sample", None) is not None and getattr(p, "summed_grad", None) is None
