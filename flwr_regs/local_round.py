"""A client's round: the only training loop in the package. Plain torch, without flwr."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flwr_regs.batches import (
    Batches,
    StartOutputs,
    batch_size,
    count_batches,
    count_examples,
    cycle,
    label_counts,
    resolve_device,
    to_device,
)
from flwr_regs.features import FeatureTap
from flwr_regs.fisher import fisher_diagonal
from flwr_regs.method import Arrays, ClientContext, Slot, Term

LossFn = Callable[[Any, Any], Tensor]
OptimizerFn = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class LocalResult:
    """What a client's round gives.

    Attributes
    ----------
    state : dict[str, Tensor]
        The model's ``state_dict`` at the end, parameters and buffers, on the CPU.
    delta : dict[str, Tensor]
        What the term sends for ``v_k − w_t``, trainable parameters only, on the CPU.
    upload, client : Slot
        The term's slots after the round (tensors on the CPU).
    num_examples : int
        ``n_k``, the size of the local data set.
    num_steps, planned_steps : int
        The local steps taken, ``s_k``, and asked for, ``E``; without a budget they are equal.
    examples_processed : int
        Examples seen in these steps, repeats counted.
    loss : float
        Mean training loss per example over the round, without the term's share.
    """

    state: dict[str, Tensor]
    delta: dict[str, Tensor]
    upload: Slot
    client: Slot
    num_examples: int
    num_steps: int
    planned_steps: int
    examples_processed: int
    loss: float


def local_round(
    model: nn.Module,
    term: Term,
    train_data: Batches,
    *,
    lr: float,
    epochs: int | None = None,
    steps: int | None = None,
    loss_fn: LossFn = nn.functional.cross_entropy,
    optimizer: OptimizerFn = torch.optim.SGD,
    device: str | torch.device = "auto",
    broadcast: Slot | None = None,
    client: Slot | None = None,
    train_mode: bool = True,
    classifier: str | None = None,
    client_id: int = -1,
    max_steps: int | None = None,
    max_seconds: float | None = None,
) -> LocalResult:
    """Train `model` in place from its present weights ``w_t`` for one round.

    Parameters
    ----------
    model : nn.Module
        Holds the global model. Parameters with ``requires_grad=False`` are left alone.
    term : Term
        The method; ``chain(...)`` of several.
    train_data : iterable of (inputs, targets)
        Can be iterated more than once, such as a DataLoader or a list.
    lr : float
        Client learning rate η, handed to `optimizer`.
    epochs, steps : int
        How long to train: exactly one of the two, at least 1. Steps run through the data in a cycle.
    optimizer : callable
        ``optimizer(params, lr=lr) -> torch.optim.Optimizer``, e.g. ``partial(SGD, momentum=0.9)``.
    broadcast, client : Slot
        What the server sent beside the model, and what this client kept from its last round.
    train_mode : bool
        False leaves the model in eval mode: batch norm and dropout as when the model is used.
    classifier : str, optional
        The output layer, for a term that needs features; default: the last ``nn.Linear``.
    client_id : int
        The client's partition id, for a term that must know its own share of what it gets.
    max_steps, max_seconds : int, float
        The client's own budget; it stops early, maybe before the first step, and says so.

    Raises
    ------
    ValueError, TypeError
        No training data, not exactly one of `epochs` and `steps`; data that can be iterated only once.
    """
    if (epochs is None) == (steps is None) or (epochs or steps or 0) < 1:
        raise ValueError(
            f"exactly one of epochs and steps must be a positive integer, "
            f"but epochs={epochs} and steps={steps}"
        )
    device = resolve_device(device)
    model.to(device).train(train_mode)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    private = term.private(list(model.state_dict()))
    params = {name: p for name, p in trained.items() if name not in private}
    if not params:
        raise ValueError(f"{type(model).__name__} shares no parameter with requires_grad=True")
    values = {name: p.detach() for name, p in params.items()}  # views: they follow the optimiser
    start = {name: v.clone() for name, v in values.items()}
    num_batches = count_batches(train_data)
    planned = steps or (epochs or 0) * num_batches
    num_steps = planned if max_steps is None else min(planned, max_steps)
    deadline = time.monotonic() + (math.inf if max_seconds is None else max_seconds)
    terms = (term, *getattr(term, "terms", ()))
    teacher = StartOutputs(model) if any(t.needs_start_output for t in terms) else None
    tap = FeatureTap(model, classifier) if any(t.needs_features for t in terms) else None
    counts = label_counts(train_data) if any(t.needs_label_counts for t in terms) else None
    ctx = ClientContext(
        start=start,
        lr=lr,
        num_steps=max(num_steps, 1),
        broadcast=to_device(broadcast or {}, device),
        client=to_device(client or {}, device),
        forward=lambda p, inputs: functional_call(model, p, (inputs,)),
        label_counts=to_device(counts, device),
        feature_mean=None if tap is None else partial(tap.mean, train_data, device),
        fisher=partial(fisher_diagonal, model, train_data, loss_fn, device),
        client_id=client_id,
    )
    if (first := term.start(start, ctx)) is not start:
        _write(values, first)
    opt = term.client_optimizer(optimizer)(list(trained.values()), lr=lr)
    total_loss = torch.zeros((), device=device)
    taken = processed = 0
    for inputs, targets in islice(cycle(train_data), num_steps):
        if time.monotonic() >= deadline:
            break
        taught = teacher(inputs, device) if teacher else None
        inputs, targets = to_device(inputs, device), to_device(targets, device)
        losses: list[Tensor] = []

        def closure(
            inputs: Any = inputs, targets: Any = targets, taught: Any = taught, losses: Any = losses
        ) -> Tensor:
            opt.zero_grad(set_to_none=True)
            output = model(inputs)
            base = loss_fn(output, targets)
            losses.append(base.detach())
            step_ctx = replace(
                ctx,
                inputs=inputs,
                targets=targets,
                output=output,
                start_output=taught,
                features=None if tap is None else tap.value,
            )
            loss: Tensor = term.loss(base, params, step_ctx)
            torch.autograd.backward(loss)
            # A parameter the batch did not reach has gradient zero, as under torch.func.grad.
            found = {n: p.grad for n, p in params.items()}
            grads = {n: torch.zeros_like(params[n]) if g is None else g for n, g in found.items()}
            grads = term.correct(grads, values, step_ctx)
            for name, p in params.items():
                p.grad = grads[name].to(p.dtype)  # a term's float32 promotes a half
            return loss

        opt.step(closure)  # an optimiser such as LBFGS calls it more than once
        total_loss += losses[0] * batch_size(targets)
        taken += 1
        processed += batch_size(targets)

    if not taken:  # an inactive client: everything stays as it was
        _write(values, start)
    delta = {name: v - start[name] for name, v in values.items()}
    sent, upload, kept = term.finish(delta, ctx) if taken else (delta, {}, client or {})
    if sent is not delta:  # else the model is already at w_t + delta, without rounding
        _write(values, {name: start[name] + sent[name] for name in start})
    opt.zero_grad(set_to_none=True)
    if tap:
        tap.close()
    return LocalResult(
        state={k: v.detach().cpu().clone() for k, v in model.state_dict().items()},
        delta=to_device(sent, "cpu"),
        upload=to_device(upload, "cpu"),
        client=to_device(kept, "cpu"),
        num_examples=count_examples(train_data),
        num_steps=taken,
        planned_steps=planned,
        examples_processed=processed,
        loss=float(total_loss) / max(processed, 1),
    )


@torch.no_grad()
def _write(values: dict[str, Tensor], new: Arrays) -> None:
    """Copy `new` into the model's parameters."""
    for name, v in values.items():
        v.copy_(new[name])
