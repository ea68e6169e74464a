"""What `finish` may ask of a client's whole data, for the clients of a stack at once. Plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from flwr_regs.client.measure.features import FeatureTap, evaluating
from flwr_regs.client.measure.fisher import joined
from flwr_regs.client.measure.fisher_layers import (
    Layers,
    factors,
    find_layers,
    of_layers,
    with_inputs,
)
from flwr_regs.client.train.batches import batch_size, mapped, tensors
from flwr_regs.cohort.batch_plan import Batch, Batches, CannotStack, Plan
from flwr_regs.cohort.member_view import View
from flwr_regs.term import Arrays, ClientContext

MEMORY = 32 * 2**20
"""Bytes of the gradients of single samples that are formed at once, over all members."""
DATA = 2**26
"""Bytes of the members' data that are gathered at once."""


@dataclass(frozen=True)
class OverData:
    """The functions over one member's data under vmap; all members have the same number of equal batches.

    They do for each member what :class:`.context_functions.Measures` does for one client.

    Attributes
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

    view: View
    batches: Sequence[Batch]
    layers: Layers
    members: int
    leaves: Sequence[list[Tensor]]
    end: Arrays
    at_start: Arrays

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions as fields of the member's context."""
        return {
            "mean_loss": self._mean_loss,
            "mean_gradient": self._mean_gradient,
            "mean_features": self._mean_features,
            "fisher": self._fisher,
        }

    def train(
        self,
        told: dict[str, Any],
        params: Arrays,
        loss: Callable[[Arrays, ClientContext], Any],
        steps: int,
        after: Callable[[Arrays], Arrays] | None = None,
    ) -> Arrays:
        """Train arrays of any names on the round's batches: see :meth:`.Measures.train`."""
        if steps > len(self.batches):
            raise CannotStack("a term trains for more steps than the round has")
        values = dict(params)
        for inputs, targets, _ in islice(self._pass(), steps):
            here = self.view.context(
                {**told, "broadcast": {}, "client": {}},
                num_steps=len(self.batches),
                inputs=inputs,
                targets=targets,
                output_at=partial(self._output_at, inputs, targets),
            )
            grads = grad(loss)(values, replace(here, broadcast={}))
            values = {n: v - self.view.shared.lr * grads[n] for n, v in values.items()}
            values = values if after is None else after(values)
        return values

    def _output_at(self, inputs: Any, targets: Any, params: Arrays) -> Any:
        """Return the model's output on a batch in its present mode; its buffers stay as they are."""
        inner = dict(self.view.shared.model.named_buffers())
        buffers = {n: v.clone() for n, v in self.end.items() if n in inner}
        rest = {n: v for n, v in self.end.items() if n not in inner}
        own = {n: p.to(rest[n].dtype) if n in rest else p for n, p in params.items()}
        return self.view.call(inputs, targets, {**rest, **own}, buffers)

    def _whole(self, params: Arrays) -> Arrays:
        """Return the model's values: with `params` that are ``w_t`` itself, as it was at the start."""
        is_start = all(params.get(n) is p for n, p in self.view.start.items())
        return {**(self.at_start if is_start else self.end), **params}

    def _pass(self) -> Iterator[tuple[Any, Any, int]]:
        for batch, leaves in zip(self.batches, self.leaves, strict=True):
            inputs, targets = batch.rebuilt(leaves)
            yield inputs, targets, batch_size(targets)

    def _loss(self, values: Arrays, inputs: Any, targets: Any) -> Tensor:
        return self.view.loss(self.view.call(inputs, targets, values, {}), targets)

    def _mean_loss(self, params: Arrays) -> Tensor:
        whole, count = self._whole(params), 0
        total = torch.zeros((), dtype=torch.float64, device=self.view.shared.device)
        with evaluating(self.view.shared.model):
            for inputs, targets, size in self._pass():
                total = total + self._loss(whole, inputs, targets).double() * size
                count += size
        return (total / count).to(_wide(next(iter(params.values()))))

    def _mean_gradient(self, params: Arrays) -> Arrays:
        whole, count = self._whole(params), 0
        total: Arrays = {n: torch.zeros_like(p, dtype=_wide(p)) for n, p in params.items()}

        def loss(p: Arrays, inputs: Any, targets: Any) -> Tensor:
            return self._loss({**whole, **p}, inputs, targets)

        with evaluating(self.view.shared.model):
            for inputs, targets, size in self._pass():
                for n, g in grad(loss)(params, inputs, targets).items():
                    total[n] = total[n] + g.to(total[n].dtype) * size
                count += size
        return {n: t / count for n, t in total.items()}

    def _mean_features(self, params: Arrays, batches: int | None = None) -> Tensor:
        shared, whole = self.view.shared, self._whole(params)
        total, count = torch.zeros((), device=shared.device), 0
        with FeatureTap(shared.model, shared.classifier) as tap, evaluating(shared.model):
            for inputs, _, size in islice(self._pass(), batches):
                self.view.call(inputs, None, whole, {})
                total = total + tap.value.sum(0, dtype=_wide(tap.value))
                count += size
        return total / count

    def _fisher(self, params: Arrays, max_samples: int | None = None) -> Arrays:
        shared, whole = self.view.shared, self._whole(params)
        held = {**self.view.rest, **whole}
        values: Arrays = {n: held[n] for n, p in shared.model.named_parameters() if p.requires_grad}
        known = of_layers(self.layers)
        rest = {n: v for n, v in values.items() if n not in known}
        zeros = {names: layer.like for names, layer in self.layers.items()}
        sizes = [v.nbytes for v in rest.values()] + [x.size for x in self.layers.values()]
        chunk = max(1, MEMORY // (self.members * sum(sizes)))
        total: Arrays = {n: torch.zeros_like(v, dtype=_wide(v)) for n, v in values.items()}

        def nll(p: Arrays, sample: Any) -> Tensor:
            inputs, targets = mapped(sample, lambda t: t[None])
            return self._loss({**whole, **p}, inputs, targets)

        of_each = vmap(with_inputs(nll, values, self.layers), in_dims=(None, None, 0))
        pairs = ((inputs, targets) for inputs, targets, _ in self._pass())
        limit, seen = sys.maxsize if max_samples is None else max_samples, 0
        with evaluating(self.view.shared.model):
            for batch, size in joined(pairs, chunk, limit, shared.device):
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
        for names, layer in self.layers.items():
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
                if not training:
                    return one(*given, over.functions)
                steps = len(over.batches)
                return one(*given, {"train": partial(over.train, given[-1]), "num_steps": steps})

            parts.append(view.vmapped(member)([b.leaves for b in batches], taken))
            order += some
    if len(parts) == 1 and order == sorted(order):
        return parts[0]
    back = torch.tensor(order, device=view.shared.device).argsort()
    return _concatenated(parts, back)


def _concatenated(parts: Sequence[Any], order: Tensor) -> Any:
    """Return nested values of tensors as one, with the rows in another order."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))[order]
    if isinstance(first, dict):
        return {k: _concatenated([part[k] for part in parts], order) for k in first}
    return tuple(_concatenated(some, order) for some in zip(*parts, strict=True))


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
