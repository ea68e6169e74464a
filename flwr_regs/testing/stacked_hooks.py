"""A cohort of clients stacked under ``torch.func.vmap``: hooks that branch on values or write fail here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from flwr_regs.chain import layers_of
from flwr_regs.client.measure.features import FeatureTap, OutputTap
from flwr_regs.term import Arrays, ClientContext, Slot, Term


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
    data: torch.Tensor,
    targets: torch.Tensor,
    classifier: str,
) -> tuple[Arrays, Slot, Slot]:
    """Run every client's round at once with plain SGD; return stacked (deltas, uploads, client slots).

    `xs` is (clients, steps, batch, features), `ys` (clients, steps, batch); a client with fewer
    `num_steps` stands still for the rest. `broadcast`, `client` and `counts` (examples of each class) are
    stacked, `params` are shared. `data`, (clients, examples, features), is NaN where a client has fewer
    examples, and so are their `targets` without meaning; `classifier` names the output layer.
    """
    tap = FeatureTap(model, classifier)
    taps = {n: OutputTap(model, n) for n in layers_of(getattr(term, "terms", (term,)))}

    def one(
        x: torch.Tensor,
        y: torch.Tensor,
        steps: torch.Tensor,
        received: Slot,
        state: Slot,
        labels: torch.Tensor,
        mine: torch.Tensor,
        mine_y: torch.Tensor,
        me: torch.Tensor,
    ) -> Any:
        there = ~mine.isnan().any(-1)
        count = there.sum()

        def output_at(inputs: torch.Tensor, p: Arrays) -> torch.Tensor:
            output: torch.Tensor = functional_call(model, p, (inputs,))
            return output

        def features_at(inputs: torch.Tensor, p: Arrays, layer: str | None = None) -> torch.Tensor:
            output_at(inputs, p)
            return (tap if layer is None else taps[layer]).value  # type: ignore[no-any-return]

        def mean_loss(p: Arrays) -> torch.Tensor:
            losses = cross_entropy(output_at(mine.nan_to_num(), p), mine_y, reduction="none")
            return (losses * there).sum() / count

        def mean_features(p: Arrays, batches: int | None = None) -> torch.Tensor:
            return (features_at(mine.nan_to_num(), p) * there[:, None]).sum(0) / count

        def fisher(p: Arrays, max_samples: int | None = None) -> Arrays:
            def one_loss(q: Arrays, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return cross_entropy(output_at(a[None], q), b[None])

            each = vmap(grad(one_loss), (None, 0, 0))(p, mine.nan_to_num(), mine_y)
            return {
                n: (g**2 * there.reshape(-1, *[1] * (g.ndim - 1))).sum(0) / count
                for n, g in each.items()
            }

        def second_model(
            p: Arrays,
            loss: Callable[..., Any],
            most: Any,
            after: Callable[[Arrays], Arrays] = lambda new: new,
        ) -> Arrays:
            for s in range(len(x)):
                at = {"inputs": x[s], "targets": y[s], **functions(s)}
                here = replace(ctx, broadcast={}, client={}, **at)
                g = grad(lambda q, here=here: loss(q, here))(p)
                new = after({n: p[n] - lr * g[n] for n in p})
                p = {n: torch.where(torch.tensor(s) < most, new[n], p[n]) for n in p}
            return p

        def functions(s: int) -> dict[str, Any]:
            return {
                "output_at": lambda p: output_at(x[s], p),
                "features_at": lambda p, layer=None: features_at(x[s], p, layer),
            }

        ctx = ClientContext(
            start=params,
            lr=lr,
            num_steps=steps.to(x.dtype),  # times a float, whole numbers would become float32
            momentum=0.0,
            broadcast=received,
            client=state,
            loss_fn=cross_entropy,
            mean_loss=mean_loss,
            mean_gradient=lambda p: grad(mean_loss)(p),
            mean_features=mean_features,
            fisher=fisher,
            train=second_model,
            label_counts=labels,
            client_id=me,
        )
        v = term.start(params, ctx)
        for s in range(len(x)):

            def step_context(p: Arrays, s: int = s) -> ClientContext:
                output = output_at(x[s], p)
                batch: dict[str, Any] = {
                    "inputs": x[s],
                    "targets": y[s],
                    "output": output,
                    "features": tap.value,
                    "layers": {name: one.value for name, one in taps.items()},
                }
                return replace(ctx, **batch, **functions(s), start_output=output_at(x[s], params))

            def objective(p: Arrays) -> torch.Tensor:
                here = step_context(p)
                loss: torch.Tensor = term.loss(cross_entropy(here.output, here.targets), p, here)
                return loss

            here = replace(step_context(v), gradient_at=grad(objective))
            grads = term.correct(grad(objective)(v), v, here)
            v = {n: torch.where(s < steps, v[n] - lr * grads[n], v[n]) for n in v}
        return term.finish({n: v[n] - params[n] for n in v}, ctx)

    ids = torch.arange(len(xs))
    stacked = vmap(one)(xs, ys, num_steps, broadcast, client, counts, data, targets, ids)
    for one_tap in reversed([tap, *taps.values()]):
        one_tap.close()
    return stacked  # type: ignore[no-any-return]
