"""What a client can measure of its model: functions over its data and over one batch. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from flwr_regs.chain import Chain
from flwr_regs.client.measure.classifier import FeatureTap, OutputTap, Taps, evaluating
from flwr_regs.client.measure.fisher import fisher_diagonal
from flwr_regs.client.train.batches import NO_DATA, Replay, batch_size, forked, on_device
from flwr_regs.client.train.task import Task, gradients
from flwr_regs.term import Arrays, ClientContext, changed

OVER_DATA = ("mean_loss", "mean_gradient", "mean_features", "fisher")
"""The functions of a context that are over the client's data."""
CALLS = (
    "the method calls the model itself, on a batch of train_data or on the inputs that loss() got"
)


@contextmanager
def _noted() -> Iterator[None]:
    """Note with an error that it was not the user's loop which called the model."""
    try:
        yield
    except Exception as error:
        error.add_note(CALLS)
        raise


@dataclass(eq=False)
class Measures:
    """Measurements of a model at any parameters, for the terms' contexts.

    The model stays as it is: its parameters, buffers and modes, and torch's random state. A generator
    that belongs to the loader advances.

    Parameters
    ----------
    model : nn.Module
        On `device`. Parameters that are not given to a measurement keep the model's values.
    data : iterable of batches
    task : Task
        How the model is called, and the loss.
    device : torch.device
    classifier : str, optional
        Name of the output layer, for features.

    What is no parameter of the method's, buffers (BatchNorm's statistics) and private entries, has the
    model's present values in a measurement over the data. `output_at` and `features_at`, which are for
    teachers, see the values at the round's start; so does all that is measured at the very arrays of
    ``w_t``, which :meth:`context` is given as `start`.

    Attributes
    ----------
    has_used_loss : bool
        Whether a term has used the task's loss.
    """

    model: nn.Module
    data: Any
    task: Task
    device: torch.device
    classifier: str | None = None

    def __post_init__(self) -> None:
        self.data = self.task.pairs(self.data)
        self._start: Arrays = {}
        self._rest: Arrays = {}  # of the model that holds `start`: buffers, private entries
        self.has_used_loss = False

    def context(self, start: Arrays, lr: float, *, read: bool = True, **more: Any) -> ClientContext:
        """Return a client's context with the functions over its data; `more` are other fields.

        Not `read`: no term calls them, so the rest of the model is not copied.
        """
        self._start = start
        if read:
            others = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            rest = {**others, **dict(self.model.named_buffers())}
            self._rest = {n: t.detach().clone() for n, t in rest.items() if n not in start}
        over_data = {name: getattr(self, name) for name in OVER_DATA}
        ctx = ClientContext(start=start, lr=lr, loss_fn=self.loss, **over_data, **more)
        if "train" in more:
            return ctx
        return replace(ctx, train=partial(self.train, ctx, Replay(self.data, self.device).again))

    def of_step(
        self, ctx: ClientContext, inputs: Any, targets: Any, teaches: bool, shown: Mapping[str, Any]
    ) -> ClientContext:
        """Return the context of a step on a batch; `shown` are fields that its forward pass has shown.

        If a term `teaches`, the model's output at the start is among them.
        """
        functions: dict[str, Any] = {"output_at": partial(self.output_at, inputs, targets)}
        functions["features_at"] = partial(self.features_at, inputs)
        if teaches and "start_output" not in shown:
            with torch.no_grad():
                shown = {**shown, "start_output": self.output_at(inputs, None, ctx.start)}
        return changed(ctx, inputs=inputs, targets=targets, **functions, **shown)

    def step_gradient(self, term: Chain, ctx: ClientContext, taps: Taps, params: Arrays) -> Arrays:
        """Return the gradient of a step's whole loss at other parameters; `ctx` is that of the step."""

        def whole(leaves: Arrays) -> Any:
            output = self.call(ctx.inputs, ctx.targets, leaves)
            there = changed(ctx, output=output, **taps.seen())
            return term.loss(ctx.loss_fn(output, ctx.targets), leaves, there)

        return self.gradient(whole, params)

    def train(
        self,
        ctx: ClientContext,
        again: Callable[[int], Iterator[tuple[Any, Any]]],
        params: Arrays,
        loss: Callable[[Arrays, ClientContext], Any],
        steps: int,
        after: Callable[[Arrays], Arrays] | None = None,
    ) -> Arrays:
        """Train arrays of any names by plain SGD: see :class:`ClientContext`; `again` draws the batches.

        The model's own mode holds: dropout and batch statistics as in the client's steps.
        """
        if not ctx.lr:
            raise RuntimeError("there is no learning rate to train with: no round has been trained")
        values = {n: p.detach().clone() for n, p in params.items()}
        for inputs, targets in again(int(steps)):
            at: dict[str, Any] = {"output_at": partial(self.call, inputs, targets)}
            at["features_at"] = partial(self._features, inputs)
            here = replace(ctx, broadcast={}, client={}, inputs=inputs, targets=targets, **at)

            def objective(leaves: Arrays, here: ClientContext = here) -> Any:
                return loss(leaves, here)

            grads = self.gradient(objective, values)
            values = {n: v - ctx.lr * grads[n] for n, v in values.items()}
            values = values if after is None else after(values)
        return {n: v.detach() for n, v in values.items()}

    def gradient(self, loss: Callable[[Arrays], Any], params: Arrays) -> Arrays:
        """Return the gradient of a function of parameters."""
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        with torch.enable_grad():
            return gradients(loss(leaves), leaves)

    def output_at(self, inputs: Any, targets: Any, params: Arrays) -> Any:
        """Return the model's output on a batch, in eval mode; differentiable."""
        with evaluating(self.model):
            return self.call(inputs, targets, {**self._rest, **params})

    def features_at(self, inputs: Any, params: Arrays, layer: str | None = None) -> Tensor:
        """Return the input of the output layer on a batch, ``(batch, d)``, in eval mode; differentiable.

        With a `layer`, return the output of that one.
        """
        with evaluating(self.model):
            return self._features(inputs, {**self._rest, **params}, layer)

    def _features(self, inputs: Any, params: Arrays, layer: str | None = None) -> Tensor:
        model = self.model
        tap: Any = FeatureTap(model, self.classifier) if layer is None else OutputTap(model, layer)
        with tap:
            self.call(inputs, None, params)
            return tap.value  # type: ignore[no-any-return]

    def call(self, inputs: Any, targets: Any, params: Arrays) -> Any:
        """Return the model's output on a batch in its present mode; its buffers stay as they are.

        Slots hold half precision as float32: `params` count in the model's own dtypes.
        """
        values = {n: b.clone() for n, b in self.model.named_buffers() if self.model.training}
        values |= {n: p.to(self._dtypes.get(n, p.dtype)) for n, p in params.items()}
        with _noted():
            return self.task.output(self.model, inputs, targets, values)

    @cached_property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return {n: p.dtype for n, p in self.model.named_parameters()}

    def _whole(self, params: Arrays) -> Arrays:
        """Return the parameters, with the rest of the model at the start if they are ``w_t`` itself."""
        at_start = all(params.get(n) is p for n, p in self._start.items())
        return {**self._rest, **params} if at_start else params

    @torch.no_grad()
    def mean_loss(self, params: Arrays) -> Tensor:
        """Return the mean loss over the data, a scalar, in eval mode."""
        whole = self._whole(params)

        def loss(inputs: Any, targets: Any) -> Arrays:
            return {"loss": self._loss(whole, inputs, targets).double() * batch_size(targets)}

        wide = torch.promote_types(next(iter(params.values())).dtype, torch.float32)
        return self._mean(loss)["loss"].to(wide)  # type: ignore[no-any-return]

    def mean_gradient(self, params: Arrays) -> Arrays:
        """Return the gradient of :meth:`mean_loss`, in the parameters' dtypes or a wider one."""
        whole = self._whole(params)
        wide = {n: torch.promote_types(p.dtype, torch.float32) for n, p in params.items()}

        def gradient(inputs: Any, targets: Any) -> Arrays:
            def loss(leaves: Arrays) -> Tensor:
                return self._loss({**whole, **leaves}, inputs, targets)

            grads = self.gradient(loss, params)
            return {n: g.to(wide[n]) * batch_size(targets) for n, g in grads.items()}

        return self._mean(gradient)

    @torch.no_grad()
    def mean_features(self, params: Arrays, batches: int | None = None) -> Tensor:
        """Return the mean feature ``(d,)`` over the data, or over its first batches, in eval mode."""
        whole, sizes = self._whole(params), set[int]()
        with FeatureTap(self.model, self.classifier) as tap:

            def features(inputs: Any, targets: Any) -> Arrays:
                self.call(inputs, None, whole)
                sizes.add(tap.value.shape[1])
                if len(sizes) > 1:
                    few, many = sorted(sizes)
                    raise ValueError(
                        f"examples have {few} or {many} features, by their batch: pad all to one length, "
                        "or name a layer with one vector for each example (classifier=)"
                    )
                wide = torch.promote_types(tap.value.dtype, torch.float32)  # half is too coarse
                return {"features": tap.value.sum(0, dtype=wide)}

            return self._mean(features, batches)["features"]  # type: ignore[no-any-return]

    def _mean(self, sums: Callable[[Any, Any], Arrays], batches: int | None = None) -> Arrays:
        """Return the means over the examples, in eval mode, given a batch's sums; default: all batches."""
        total, count = Arrays(), 0
        with forked(), evaluating(self.model):
            for inputs, targets in on_device(islice(self.data, batches), self.device):
                for name, value in sums(inputs, targets).items():
                    total[name] = total.get(name, 0) + value
                count += batch_size(targets)
        if not total:
            raise ValueError(NO_DATA)
        return {name: value / count for name, value in total.items()}

    def fisher(self, params: Arrays, max_samples: int | None = None) -> Arrays:
        """Return the diagonal of the empirical Fisher information: see :func:`fisher_diagonal`."""
        self.has_used_loss = True
        whole = self._whole(params)
        return fisher_diagonal(self.model, self.data, self.task, self.device, whole, max_samples)

    def loss(self, output: Any, targets: Any) -> Tensor:
        """Return the task's loss."""
        self.has_used_loss = True
        with _noted():
            return self.task.loss(output, targets)

    def _loss(self, params: Arrays, inputs: Any, targets: Any) -> Tensor:
        return self.loss(self.call(inputs, targets, params), targets)
