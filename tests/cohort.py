"""A cohort of clients stacked under ``torch.func.vmap``: the test of the hooks' purity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from flwr_regs.method import Arrays, ClientContext, Slot, Term


def cohort_round(
    model: nn.Module,
    term: Term,
    params: Arrays,
    xs: torch.Tensor,
    ys: torch.Tensor,
    num_steps: torch.Tensor,
    lr: float,
    broadcast: Slot,
    client: Slot,
    counts: torch.Tensor,
) -> tuple[Arrays, Slot, Slot]:
    """Run every client's round at once with plain SGD.

    `xs` is (clients, steps, batch, features), `ys` (clients, steps, batch); a client with fewer
    `num_steps` stands still for the rest. `client` and `counts` (examples of each class) are stacked,
    `params` and `broadcast` are shared.
    """

    def one(
        x: torch.Tensor, y: torch.Tensor, steps: torch.Tensor, state: Slot, labels: torch.Tensor
    ) -> Any:
        ctx = ClientContext(
            start=params,
            lr=lr,
            num_steps=steps,
            broadcast=broadcast,
            client=state,
            forward=lambda p, inputs: functional_call(model, p, (inputs,)),
            label_counts=labels,
        )
        v = term.start(params, ctx)
        for s in range(xs.shape[1]):

            def objective(p: Arrays, s: int = s) -> torch.Tensor:
                output = functional_call(model, p, (x[s],))
                base = nn.functional.cross_entropy(output, y[s])
                batch = {"inputs": x[s], "targets": y[s], "output": output}
                taught = functional_call(model, params, (x[s],))
                return term.loss(base, p, replace(ctx, **batch, start_output=taught))

            grads = term.correct(grad(objective)(v), v, ctx)
            v = {n: torch.where(s < steps, v[n] - lr * grads[n], v[n]) for n in v}
        return term.finish({n: v[n] - params[n] for n in v}, ctx)

    return vmap(one)(xs, ys, num_steps, client, counts)
