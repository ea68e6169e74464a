"""A stack's step as one compiled graph: forward, backward, and plain SGD's update. Plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx

from flwr_regs.cohort.batch_plan import Batch
from flwr_regs.cohort.member_view import View, random_state, set_random_state
from flwr_regs.term import Arrays

LOG = logging.getLogger("flwr")
KEPT = 20
"""Compiled steps that are kept."""
_STEPS: dict[Hashable, Callable[..., Any] | None] = {}


def compiled_step(
    key: Hashable, view: View, values: Arrays, held: Arrays, batch: Batch, lr: float
) -> tuple[dict[str, Any], Tensor, Arrays] | None:
    """Return (gradients, losses, new buffers) of a step without terms; None if it cannot be compiled.

    The graph is made once for a `key` and the shapes of what goes in; `key` says what else the step depends
    on. With a learning rate that is not 0, the parameters after a step of plain SGD come in place of the
    gradients. Where the step cannot be traced or there is no compiler, a sentence in the log says so.
    """
    size = len(batch.leaves[0])
    values = {n: v.detach() for n, v in values.items()}
    held = {**{n: v.expand(size, *v.shape) for n, v in view.rest.items()}, **held}
    names = [*values], [*held]
    given = [*values.values(), *held.values(), *batch.leaves]
    given.append(torch.tensor(lr, dtype=torch.float64, device=given[0].device))
    shapes = tuple((tuple(t.shape), t.dtype) for t in given)
    key = key, shapes, names[0][0], bool(lr)
    try:
        if key not in _STEPS:
            if len(_STEPS) == KEPT:
                del _STEPS[next(iter(_STEPS))]
            _STEPS[key] = None
            before = random_state(given[0].device)
            copies = [t.clone() for t in given]  # it is run, and may write to buffers
            graph = make_fx(_step(view, names, batch, bool(lr)))(*copies)
            _STEPS[key] = torch._inductor.compile(graph, given)
            set_random_state(given[0].device, before)
        if (step := _STEPS[key]) is None:
            return None
        out = step(*given)
    except Exception as error:  # whatever torch or a compiler raises
        _STEPS[key] = None
        why = str(error).strip().partition("\n")[0]
        LOG.warning("StackedGrid: the step is not compiled: %s", why)
        return None
    last = len(values)
    stepped = dict(zip(names[0], out[:last], strict=True))
    return stepped, out[last], dict(zip(view.buffers, out[last + 1 :], strict=True))


def _step(view: View, names: Any, batch: Batch, moves: bool) -> Callable[..., Any]:
    """Return a step as a function of tensors: trained values, others, batch, learning rate."""

    def one(values: Arrays, held: Arrays, leaves: list[Tensor]) -> Any:
        inputs, targets = batch.rebuilt(leaves)
        given = {**held, **values}
        output = view.call(inputs, targets, given)
        return view.loss(output, targets), {n: given[n] for n in view.buffers}

    def step(*given: Tensor) -> Any:
        rest, parts = list(given), []
        for some in names:
            parts.append(dict(zip(some, rest, strict=False)))
            rest = rest[len(some) :]
        (values, held), lr = parts, rest.pop()

        def total(values: Arrays, *others: Any) -> Any:
            losses, buffers = view.vmapped(one)(values, *others)
            return losses.sum(), (losses.detach().float(), buffers)

        grad = grad_and_value(total, has_aux=True)
        grads, (_, (losses, buffers)) = grad(values, held, rest)
        moved = [v - lr * grads[n] if moves else grads[n] for n, v in values.items()]
        return *moved, losses, *buffers.values()

    return step
