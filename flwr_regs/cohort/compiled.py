"""The plain loss and gradient of a stack's step under ``torch.compile``. Plain torch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from flwr_regs.client.train.task import Task
from flwr_regs.cohort.member_view import Kernels
from flwr_regs.term import Arrays

LOG = logging.getLogger("flwr")
KEPT = 20
"""Compiled steps that are kept."""
_STEPS: dict[Hashable, Callable[..., Any] | None] = {}
Step = Callable[[Arrays, Arrays, Any], tuple[Arrays, Tensor, Arrays]]
"""(trained values, other entries, batch) -> (gradients, losses, the other entries after it)."""


def compiled(key: Hashable, model: nn.Module, task: Task) -> Step | None:
    """Return the compiled step of a model and its task; None if it cannot be compiled.

    `key` says what the step depends on beside its arguments, whose first axis is that of the members. It
    falls back, with one sentence in the log, where there is no compiler.
    """
    if key not in _STEPS:
        if len(_STEPS) == KEPT:
            del _STEPS[next(iter(_STEPS))]
        _STEPS[key] = (
            None
            if (why := _unfit(model))
            else torch.compile(_step(copy.deepcopy(model), task), dynamic=False)
        )
        if why:
            LOG.info("StackedGrid: compile=True has no effect: %s", why)
    step = _STEPS[key]
    if step is None:
        return None

    def guarded(values: Arrays, others: Arrays, batch: Any) -> tuple[Arrays, Tensor, Arrays]:
        try:
            return step(values, others, batch)  # type: ignore[no-any-return]
        except Exception as error:
            _STEPS[key] = None
            why = str(error).strip().partition("\n")[0]
            LOG.warning("StackedGrid: the step is not compiled: %s", why)
            raise CannotCompile from error

    return guarded


class CannotCompile(Exception):
    """The step runs without ``torch.compile``."""


def _unfit(model: nn.Module) -> str:
    """Return why a model's step is not compiled; "" if it may be."""
    kinds = nn.Embedding | nn.EmbeddingBag
    if any(isinstance(m, kinds) for m in model.modules()):
        return "the indices of its embeddings are checked in each step"
    entries = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return (
        "an entry of the model has two names"
        if len({id(t) for _, t in entries}) < len(entries)
        else ""
    )


def _step(model: nn.Module, task: Task) -> Step:
    def one(values: Arrays, others: Arrays, batch: Any) -> Any:
        args, kwargs = task.arguments(*batch)
        others = dict(others)
        with Kernels():
            output = functional_call(model, {**values, **others}, args, kwargs)
            return task.loss(task.logits(output), batch[1]), others

    def total(values: Arrays, others: Arrays, batch: Any) -> Any:
        losses, after = vmap(one, randomness="different")(values, others, batch)
        return losses.sum(), (losses.detach().float(), after)

    def step(values: Arrays, others: Arrays, batch: Any) -> Any:
        grads, (_, (losses, after)) = grad_and_value(total, has_aux=True)(values, others, batch)
        return grads, losses, after

    return step
