"""What `finish` may ask of a client's whole data, for the clients of a stack at once. Plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.measure.features import evaluating
from flwr_regs.client.measure.fisher import joined
from flwr_regs.client.measure.fisher_layers import (
    Layers,
    factors,
    find_layers,
    of_layers,
    with_inputs,
)
from flwr_regs.client.train.batches import mapped, tensors
from flwr_regs.cohort.batch_plan import Batch, Batches, CannotStack, Plan
from flwr_regs.cohort.member_view import View
from flwr_regs.term import Arrays

MEMORY = 32 * 2**20
"""Bytes of the gradients of single samples that are formed at once, over all members."""
DATA = 2**26
"""Bytes of the members' data that are gathered at once."""


class OverData(Measures):
    """The functions over one member's data under vmap; all members have the same number of equal batches.

    Parameters
    ----------
    view : View
    batches : sequence of Batch
        One pass over the members' data, stacked.
    layers : Layers
        The model's layers whose samples' gradients need not be formed.
    members : int
    leaves : sequence of list of Tensor
        The member's own batches.
    end, at_start : Arrays
        What its model holds at the round's end, and what it held at its start beside what terms see.
    """

    def __init__(
        self,
        view: View,
        batches: Sequence[Batch],
        layers: Layers,
        members: int,
        leaves: Sequence[list[Tensor]],
        end: Arrays,
        at_start: Arrays,
    ) -> None:
        shared = view.shared
        pairs = [batch.rebuilt(parts) for batch, parts in zip(batches, leaves, strict=True)]
        super().__init__(shared.model, pairs, shared.task, shared.device, shared.classifier)
        self._view, self._layers, self._members, self._end = view, layers, members, end
        self._start, self._rest = view.start, at_start

    def functions(self, training: bool, told: dict[str, Any]) -> dict[str, Any]:
        """Return the functions as fields of the member's context; `training`: the one that trains."""
        if training:
            steps = len(self.data)
            ctx = self._view.context(told, num_steps=steps)
            return {"train": partial(self.train, ctx, self._again), "num_steps": steps}
        names = ("mean_loss", "mean_gradient", "mean_features", "fisher")
        return {name: getattr(self, name) for name in names}

    def _again(self, steps: int) -> Iterator[tuple[Any, Any]]:
        if steps > len(self.data):
            raise CannotStack("a term trains for more steps than the round has")
        return islice(self.data, steps)

    def gradient(self, loss: Callable[[Arrays], Any], params: Arrays) -> Arrays:
        """Return the gradient of a function of parameters."""
        return grad(loss)(params)  # type: ignore[no-any-return]

    def call(self, inputs: Any, targets: Any, params: Arrays) -> Any:
        """Return the model's output on a batch in its present mode; its buffers stay as they are."""
        end, inner = self._end, dict(self.model.named_buffers())
        like_end = {n: p.to(end[n].dtype) if n in end else p for n, p in params.items()}
        values = {**end, **like_end}
        buffers = {n: values.pop(n).clone() for n in inner if n in values}
        return self._view.call(inputs, targets, values, buffers)

    def _loss(self, inputs: Any, targets: Any, params: Arrays) -> Tensor:
        with evaluating(self.model):
            return self._view.loss(self.call(inputs, targets, params), targets)

    def fisher(self, params: Arrays, max_samples: int | None = None) -> Arrays:
        """Return the diagonal of the empirical Fisher information: see :func:`.fisher_diagonal`."""
        whole = {**self._end, **self._whole(params)}
        held = {**self._view.rest, **whole}
        values: Arrays = {n: held[n] for n, p in self.model.named_parameters() if p.requires_grad}
        known = of_layers(self._layers)
        rest = {n: v for n, v in values.items() if n not in known}
        zeros = {names: layer.like for names, layer in self._layers.items()}
        sizes = [v.nbytes for v in rest.values()] + [x.size for x in self._layers.values()]
        chunk = max(1, MEMORY // (self._members * sum(sizes)))
        total: Arrays = {n: torch.zeros_like(v, dtype=_wide(v)) for n, v in values.items()}

        def nll(p: Arrays, sample: Any) -> Tensor:
            inputs, targets = mapped(sample, lambda t: t[None])
            output = self._view.call(inputs, targets, {**whole, **p}, {})
            return self._view.loss(output, targets)

        of_each = vmap(with_inputs(nll, values, self._layers), in_dims=(None, None, 0))
        limit, seen = sys.maxsize if max_samples is None else max_samples, 0
        with evaluating(self.model):
            for batch, size in joined(self.data, chunk, limit, self.device):
                for first in range(0, size, chunk):
                    samples = mapped(batch, itemgetter(slice(first, min(first + chunk, size))))
                    (grads, outputs), rows = of_each(rest, zeros, samples)
                    self._add(total, grads, outputs, rows)
                seen += size
        return {n: t / seen for n, t in total.items()}

    def _add(self, total: Arrays, grads: Arrays, outputs: Any, rows: Any) -> None:
        """Add the squares of some samples' gradients: see :func:`.fisher_layers.add_layers`."""
        for n, g in grads.items():
            total[n] = total[n] + g.to(total[n].dtype).square().sum(0)
        for names, layer in self._layers.items():
            g, a = outputs[names].flatten(1), rows[names].flatten(1)
            if layer.bias:
                bias = total[layer.bias]
                total[layer.bias] = bias + g.to(bias.dtype).square().sum(0)
            if layer.weight:
                weight = total[layer.weight]
                left, right = factors(g.to(weight.dtype), a.to(weight.dtype))
                total[layer.weight] = weight + left @ right


def over_data(
    view: View,
    passes: Sequence[Plan],
    end: Arrays,
    at_start: Arrays,
    given: tuple[Any, ...],
    one: Callable[..., Any],
    training: bool = False,
) -> Any:
    """Return what ``one(*given, functions)`` is for each member, stacked.

    Parameters
    ----------
    view : View
    passes : sequence of Plan
        The members' data, each as one pass.
    end, at_start : Arrays
        What the members' models hold at the round's end, and beside what terms see at its start.
    given : tuple
        Nested dicts of stacked tensors.
    one : callable
    training : bool
        `passes` are the batches of the round's steps, for `train` alone.
    """
    if not training:  # Fisher information looks for linear layers
        view = replace(view, shared=replace(view.shared, precision=None), as_products=False)
    groups: dict[Any, list[int]] = {}
    for row, plan in enumerate(passes):
        groups.setdefault((plan.kind, plan.forms), []).append(row)
    parts: list[Any] = []
    order: list[int] = []
    for rows in groups.values():
        first = passes[rows[0]]
        size = sum(t.nbytes for i in range(len(first)) for t in tensors(first.batch(i)))
        most = max(DATA // max(size, 1), 1)
        for some in (rows[i : i + most] for i in range(0, len(rows), most)):
            chosen = [passes[row] for row in some]
            gathered = Batches(chosen, view.shared.device)
            batches = [gathered.of(i, range(len(chosen))) for i in range(len(first))]
            taken = mapped((end, at_start, given), itemgetter(some))
            first_end = {n: t[0] for n, t in taken[0].items()}
            layers = {} if training else layers_of_stack(view, batches[0], first_end)
            shared = partial(OverData, view, batches, layers, len(some))

            def member(leaves: Any, taken: Any, shared: Any = shared) -> Any:
                end, at_start, given = taken
                over = shared(leaves, end, at_start)
                return one(*given, over.functions(training, given[-1]))

            parts.append(view.vmapped(member)([b.leaves for b in batches], taken))
            order += some
    if len(parts) == 1 and order == sorted(order):
        return parts[0]
    back = torch.tensor(order, device=view.shared.device).argsort()
    return tree_map(lambda *rows: torch.cat(rows)[back], *parts)


def layers_of_stack(view: View, batch: Batch, values: Arrays) -> Layers:
    """Return the layers that :func:`.fisher_layers.find_layers` finds, with one member's `values`."""
    shared = view.shared
    trained = {n: p for n, p in shared.model.named_parameters() if p.requires_grad}
    whole = {**view.rest, **values}

    def nll(p: Arrays, sample: Any) -> Tensor:
        inputs, targets = mapped(sample, lambda t: t[None])
        given = {**whole, **p}
        return shared.task.loss(view.call(inputs, targets, given, {}), targets)

    sample: Any = batch.rebuilt([t[0, 0] for t in batch.leaves])
    with evaluating(shared.model):
        return find_layers(
            shared.model, nll, {n: whole.get(n, p) for n, p in trained.items()}, sample
        )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
