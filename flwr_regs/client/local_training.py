"""A client's round: the only training loop in the package. Plain torch, without flwr.

:class:`LocalTraining` is a method's part in any training loop; :func:`local_round` is the package's loop.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import finalize, proxy

import torch
from torch import Tensor, nn

import flwr_regs.client.train.batches as data
import flwr_regs.client.train.remedies as remedies
from flwr_regs.chain import Chain, check_instances
from flwr_regs.client.measure.classifier import Hook, Modes, Taps, in_modes, modes_of
from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.train.optimizer import (
    ClientOptimizer,
    Factory,
    check_factory,
    clip,
    momentum_of,
)
from flwr_regs.client.train.task import LossFn, OutputFn, Task, returns_loss, uncompiled
from flwr_regs.client.train.trainable import every_parameter, private_entries, trained_parameters
from flwr_regs.term import (
    NOT_NEGATIVE,
    POSITIVE,
    SWITCH,
    WHOLE,
    Arrays,
    ClientContext,
    Slot,
    Term,
    changed,
    plain_number,
)
from flwr_regs.wire.config import check_optimizer

STILL = (
    "{} local steps have left the model where it began: is the optimiser's step() called, and does it move "
    "the parameters?"
)
"""Said where a step of plain SGD would have moved the model."""
SOFTMAX = (
    "the model's outputs are probabilities: torch's cross-entropy takes a softmax itself, so leave the "
    "model's own out"
)
ACCUMULATES = (
    "the method takes gradients of a batch itself, which gradient accumulation does not show it"
)
IN_DDP = (
    "the method takes gradients itself, and DistributedDataParallel would leave them those of this "
    "process's batches alone: train this client in one process"
)
PER_SAMPLE = (
    "Opacus makes the gradients anew in its optimiser's step, and what correct() does would be lost: take "
    "the step as `if optimizer.pre_step(): loop.correct(); optimizer.original_optimizer.step()`"
)
ROSE = 10.0
"""How many times its first step's loss a round's mean loss is too much."""


def has_risen(loss: float, first: float) -> bool:
    """Whether a round's mean loss is over `ROSE` times its first step's, and over `ROSE`.

    Losses of single batches below 1 differ by as much where a model has learned.
    """
    return loss > ROSE * max(first, 1.0)


@dataclass(frozen=True)
class LocalResult:
    """The result of a client's round; tensors are on the CPU.

    Attributes
    ----------
    state : dict[str, Tensor]
        The model's ``state_dict`` at the end, parameters and buffers.
    delta, upload, client : dict
        ``v_k − w_t`` as the term sends it, the term's upload slot and its client slot.
    num_examples, examples_processed : int
        ``n_k``, the size of the local data set; the examples processed, with repeats.
    num_steps, planned_steps : int
        Local steps taken, ``s_k``, and planned, ``E``; without a budget they are equal.
    loss : float
        Mean training loss per example over the round, without the term's share.
    rose : bool
        Whether that is far above the first step's: see :func:`has_risen`.
    output_layer : str, optional
        The name of the output layer, if the method reads features.
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
    rose: bool
    output_layer: str | None = None


class LocalTraining:
    """A method's part in a client's local steps, for a training loop of any kind.

    Build it when the model holds ``w_t``. For each step of the client's optimiser, the loop calls `loss`
    after the forward pass, runs backward on the result, and calls `correct`, after AMP's unscaling and
    before clipping. At the end it calls `finish`.

    Parameters
    ----------
    model : nn.Module
        Trained in place. Parameters with ``requires_grad=False`` do not change. ``torch.compile(model)``
        runs compiled in the steps of `local_round`, but for a method that reads features.
    term : Term
        The method; ``chain(...)`` of several.
    train_data : iterable of batches
        Pairs of (inputs, targets), or mappings. Must allow several iterations, as a DataLoader or a list.
    lr, epochs, steps : float, int, int
        Client learning rate η; exactly one of `epochs` and `steps`. Steps cycle through the data.
    loss_fn, target_key, output_fn : callable, str, callable
        The loss (None: the model's own), the key of the targets in batches that are mappings, and where the
        logits are in the model's output: see :class:`flwr_regs.client.train.task.Task`.
    broadcast, client : Slot
        The term's broadcast, and the client slot that this client kept from its last round.
    device, train_mode : str or torch.device, bool
        ``"auto"``: the accelerator, if there is one. False trains with the model in eval mode.
    classifier, client_id, max_steps, max_seconds : str, int, int, float
        The output layer (default: the last ``nn.Linear``) and the partition id, for terms that need them.
        The client's budget: `batches` stops when it is spent, possibly before the first step.
    config : mapping, optional
        The round's config. Terms read it; ``"optimizer"``, ``"momentum"`` and ``"weight-decay"`` describe
        the client's optimiser, and ``"clip-norm"`` is the largest norm of a step's gradient, over all that
        is trained as one vector. `correct` clips, after the terms.

    Raises
    ------
    ValueError, TypeError
        No training data; not exactly one of `epochs` and `steps`; data that can be iterated only once;
        batches without clear targets; an output without logits; an output layer that does not make them;
        a wrong rate, duration or budget; a wrong optimiser, momentum, weight decay or norm in
        `config`.
    """

    def __init__(
        self,
        model: nn.Module,
        term: Term,
        train_data: data.Batches,
        *,
        lr: float,
        epochs: int | None = None,
        steps: int | None = None,
        loss_fn: LossFn | None = nn.functional.cross_entropy,
        target_key: str | None = None,
        output_fn: OutputFn | None = None,
        device: str | torch.device = "auto",
        broadcast: Slot | None = None,
        client: Slot | None = None,
        train_mode: bool = True,
        classifier: str | None = None,
        client_id: int = -1,
        max_steps: int | None = None,
        max_seconds: float | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        who = type(self).__name__
        POSITIVE.check(who, "lr", lr := plain_number(lr))
        for name, number in (("epochs", epochs), ("steps", steps)):
            WHOLE.check(who, name, number, optional=True)
        if (epochs is None) == (steps is None) or (epochs or steps or 0) < 1:
            both = f"epochs={epochs} and steps={steps}"
            raise ValueError(f"exactly one of epochs and steps must be positive, but {both}")
        config = config or {}
        check_optimizer(config, "config")
        WHOLE.check(who, "max_steps", max_steps, optional=True)
        NOT_NEGATIVE.check(who, "max_seconds", max_seconds, optional=True)
        SWITCH.check(who, "train_mode", train_mode)
        check_instances([term], who)
        data.check_batches(train_data, "train_data")
        self._called = model
        self.model = model = uncompiled(model)
        self.lr, self.device = lr, data.resolve_device(device)
        self._task = Task(loss_fn, target_key, output_fn)
        self._data = pairs = self._task.pairs(train_data)
        slots = {"broadcast": broadcast or {}, "client": client or {}}
        self._alone = None if isinstance(term, Chain) else term.name
        if not isinstance(term, Chain):
            term, slots = Chain((term,)), {key: {term.name: slot} for key, slot in slots.items()}
        self._term, self._kept = term, slots["client"]
        term.restrict(config)
        model.to(self.device)
        model.train(train_mode)
        private = private_entries(model, term)
        every = every_parameter(model)
        self._trained = trained_parameters(model, term, every)
        trained_ids = {id(p) for p in self._trained.values()}
        self._held = [p for _, p in every if p.requires_grad and id(p) not in trained_ids]
        self._frozen = [p for _, p in every if not p.requires_grad]
        self._params = {name: p for name, p in self._trained.items() if name not in private}
        if not self._params:
            raise ValueError(
                f"{type(model).__name__} shares no parameter with requires_grad=True"
                + (" that the method does not hold still" if self._held else "")
            )
        for _, p in every:
            p.grad = None  # of a round that failed
        self.planned_steps = planned = steps or (epochs or 0) * data.count_batches(pairs)
        self.num_steps = planned if max_steps is None else min(planned, max_steps)
        self._deadline = time.monotonic() + (math.inf if max_seconds is None else max_seconds)
        needs = {need for t in term.terms for need in t.needs}
        self._teaches = "start_output" in needs
        self._hooks = hooks = ExitStack()
        finalize(self, hooks.close)  # also after an error in the loop
        self._taps = Taps(model, term.terms, classifier)
        hooks.callback(self._taps.close)
        counts = data.label_counts(pairs) if "label_counts" in needs else None
        self._measures = Measures(model, pairs, self._task, self.device, classifier)
        whole_gradients = any(t.acts("correct") and not t.elementwise for t in term.terms)
        # for `train`, and for `gradient_at`
        trains = whole_gradients or any(t.acts("finish") for t in term.terms)
        self._replay = data.Replay(pairs, self.device, batches=trains, forwards=whole_gradients)
        if whole_gradients and self._called is model:  # hooks would break a compiled one's graph
            hook = Hook(self._replay.note_forward)
            hooks.callback(model.register_forward_pre_hook(hook).remove)
        me = proxy(self)  # no cycle: what a round held is freed at its end, not by a collection
        self._ctx = self._measures.context(
            {name: v.clone() for name, v in self._values.items()},
            lr,
            read=bool(term.terms),
            num_steps=self.num_steps,
            planned_steps=planned,
            gradient_at=partial(type(self)._gradient_at, me),
            train=partial(type(self)._train, me),
            **data.to_device({**slots, "label_counts": counts}, self.device),
            client_id=client_id,
            config=config,
        )
        self._evolves = bool(term.overriding("evolve"))
        self._corrects = self._evolves or bool(term.overriding("correct"))
        self._adds_loss = bool(term.overriding("loss"))
        self._perturbs = bool(term.overriding("point"))
        self._step_ctx: ClientContext | None = None  # from the loss of a step to its `correct`
        self._went_back, self._passes = False, 0  # backward passes since the last `correct`
        self._finished = False
        self._accumulates = False  # gradients of several batches, for a step
        self._differs = ""  # how the loop's loss is another than loss_fn's
        self._step_loss: tuple[Tensor, Any, Any] | None = None  # an own loop's, and of what
        self._modes: Modes = {}  # at the first step: a loop may end with an evaluation of its own
        self._losses: list[Tensor] = []  # read at the end: a read waits for a GPU
        self._sizes: list[int] = []
        self._taken = 0
        self._steps_before = 0  # the optimiser's, before the present step
        self._optimizer = ClientOptimizer(term, self._trained, self._ctx)
        self._before: Arrays | None = None  # the parameters, while the model is perturbed
        self._begin = term.start(self._ctx.start, self._ctx) if self.num_steps else self._ctx.start
        self._would_move = False  # whether plain SGD's first step moves the model
        self._begins_finite = True  # whether the first step's gradients are finite
        if self._begin is not self._ctx.start:
            _write(self._values, self._begin)

    @property
    def _values(self) -> Arrays:
        return {n: p.detach() for n, p in self._params.items()}  # views of the model

    def optimizer(self, make: Factory = None) -> torch.optim.Optimizer:
        """Return the client's optimiser ``make(params, lr=lr)``, adapted by the method.

        Without `make` it is the one that the round's config describes, or SGD. It holds what is trained and
        nothing else: weight decay and momentum move no parameter that is held still. With `KeptOptimizer`
        among the terms it goes on with the state of the client's last round.

        Raises ValueError if there is `make`, and the config sets an optimiser, momentum or weight decay;
        if the state is to be kept of an optimiser that the method makes; and if `make` gives one of
        none of the parameters. TypeError if it gives no optimiser.
        """
        check_factory(type(self).__name__, make)
        made = self._optimizer.made(make)
        self._ctx = changed(self._ctx, momentum=momentum_of(made, self._ctx.lr))
        return made

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) on the device for each local step, until a budget is spent.

        Of a batch that is a mapping, `target_key` names the targets; its other entries are the inputs: one
        alone as it is, several as a dict for ``model(**inputs)``.
        """
        drawn = self._replay.draw(self.num_steps)
        for _ in range(self.num_steps):
            if time.monotonic() >= self._deadline:
                return
            batch = next(drawn)
            self._perturb()
            yield batch

    def _perturb(self) -> None:
        """Move the model to where the terms take the step's loss and gradient."""
        if not self._perturbs or self._before is not None:
            return
        values = self._values
        with torch.no_grad():
            there = self._term.point(values, self._ctx)
        self._before = {n: v.clone() for n, v in values.items()}
        if there is not values:
            _write(values, there)

    def _go_back(self) -> None:
        """Put the parameters back from where the gradient was taken."""
        if self._before is not None:
            _write(self._values, self._before)
            self._before = None

    def _has_moved(self) -> bool:
        """Return whether the parameters are no longer where the round began."""
        values = (self._before or self._values).items()
        return any(not torch.equal(v, self._begin[n].to(v)) for n, v in values)

    def loss(self, base: Tensor, inputs: Any, targets: Any, output: Any) -> Tensor:
        """Return the local objective from a batch's plain loss; call it right after the forward pass.

        `output` is what the model returned. Raises TypeError if it holds no logits, and ValueError for a
        method that reads features if the model was given compiled.
        """
        if self._taps and self._called is not self.model:
            raise ValueError(
                "the method reads features, which a compiled model does not show: do without torch.compile"
            )
        if not torch.is_grad_enabled():
            raise RuntimeError("loss() is for training steps: in an evaluation, leave it out")
        if self._perturbs and self._before is None:
            raise RuntimeError("the method perturbs the model before a step's pass: use batches()")
        if not isinstance(base, Tensor) or base.numel() != 1:
            given = tuple(base.shape) if isinstance(base, Tensor) else f"a {type(base).__name__}"
            raise ValueError(
                f"loss() takes the batch's mean loss, a tensor with one number, not {given}"
            )
        if not self._sizes and (refused := self._optimizer.counts_on_sgd) and self._has_moved():
            what = "the loop changes the model before its first step, or a forward pass does"
            raise ValueError(refused.format(what))
        self._optimizer.in_own_loop = True
        logits = self._task.logits(output)
        self._step_loss = base.detach(), logits, targets
        return self._objective(base, inputs, targets, logits)

    def objective(self, inputs: Any, targets: Any, watched: bool = True) -> Tensor:
        """Return the local objective on a batch: the forward pass, `loss_fn` and `loss` in one.

        Not `watched`, for a loop that is sure to run backward on it, `correct` does not look whether it
        did.
        """
        self._perturb()  # again, if an optimiser calls its closure more than once
        # a compiled model does not run hooks
        model = self.model if self._taps else self._called
        output, loss_fn = None, self._task.loss_fn
        first = not self._sizes and remedies.is_cross_entropy(loss_fn)
        try:
            output = self._task.output(model, inputs, targets)
            if first and (wrong := self._lost_label(output, targets)):
                raise ValueError(wrong)  # a GPU's own error says nothing, and stays
            base = self._task.loss(output, targets)
            if first and remedies.are_probabilities(output):
                warnings.warn(SOFTMAX, stacklevel=2)
        except Exception as error:
            help_ = remedies.remedy(error, inputs, output, targets, model, loss_fn)
            if help_ and help_ != str(error):
                raise ValueError(f"{help_} (torch: {error})") from error
            raise
        return self._objective(base, inputs, targets, output, watched)

    def _objective(
        self, base: Tensor, inputs: Any, targets: Any, output: Any, watched: bool = True
    ) -> Tensor:
        """Return the step's loss; `correct` then demands that backward goes through it."""
        size = data.batch_size(targets)
        if not self._sizes:
            if not remedies.are_finite(data.tensors([inputs, targets])):
                raise ValueError(remedies.not_finite(self._data))
            self._taps.check(output)
            self._modes = modes_of(self.model)
            counts = self._ctx.label_counts
            if counts is not None and isinstance(output, Tensor) and output.ndim == 2:
                counts = data.padded(counts, output.shape[1])
            self._ctx = changed(self._ctx, label_counts=counts, batch_size=size)
        self._losses.append(base.detach())
        self._sizes.append(size)
        ctx, self._step_ctx = self._of_step(inputs, targets, output), None
        loss = self._term.loss(base, self._params, ctx) if self._adds_loss else base
        if not loss.requires_grad:
            off = "gradients are switched off, by torch.no_grad or the like"
            why = "the loss depends on no trained parameter" if torch.is_grad_enabled() else off
            raise RuntimeError(f"{why}: nothing can be learnt")
        self._step_ctx, self._went_back = ctx, not watched
        self._steps_before = self._optimizer.steps
        if watched:
            loss.register_hook(partial(type(self)._note_backward, proxy(self)))
        return loss

    def _note_backward(self, _: Tensor) -> None:
        if self._passes and not any(
            p.grad is not None and p.grad.any() for p in self._params.values()
        ):
            self._passes = 0  # a batch was left out, or a gradient only looked at
        self._went_back = True
        self._passes += 1
        self._steps_before = self._optimizer.steps

    def _of_step(self, inputs: Any, targets: Any, output: Any) -> ClientContext:
        """Return the context of a step; without its fields, if no term reads them."""
        if not self._adds_loss and not self._corrects:
            return self._ctx
        shown = {"output": output, **self._taps.seen()}  # before another forward pass
        return self._measures.of_step(self._ctx, inputs, targets, self._teaches, shown)

    def correct(self) -> None:
        """Correct the gradients in place, then clip them if the config says so.

        A parameter that the loss does not depend on has gradient zero, as under ``torch.func.grad``.

        Raises RuntimeError if the step skipped `loss` or backward, if the loss is another model's, or if
        the loop has made its optimiser itself where the method adapts it or the config describes it.
        """
        if (ctx := self._step_ctx) is None:
            raise RuntimeError("call correct() after loss(): it saw no loss since the last step")
        if not self._went_back:
            raise RuntimeError("backward() did not go through what loss() returned")
        if why := self._optimizer.missing:
            raise RuntimeError(f"{why}: create it with loop.optimizer(...)")
        if self._optimizer.steps > self._steps_before:
            raise RuntimeError(
                "correct() comes before the optimiser's step, and this step is taken"
            )
        if self._optimizer.only_adds:
            raise RuntimeError(
                "correct() comes once for each step: after the last of several batches"
            )
        changes = self._corrects or "clip-norm" in self._ctx.config
        if changes and any(map(remedies.awaits_gradient, self._params.values())):
            raise RuntimeError(PER_SAMPLE)
        self._go_back()
        if all(p.grad is None for p in self._params.values()):
            raise RuntimeError(
                "the loss depends on no parameter of this round's model: train that one, not a copy of it"
            )
        for n, p in self._params.items():
            if p.grad is None:
                if not p.requires_grad:
                    raise RuntimeError(f"the loop has frozen '{n}': do so before the round")
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse and self._corrects:
                p.grad = p.grad.to_dense()
        if self._corrects:
            # backward has freed the graph behind these
            seen = {n: getattr(ctx, n) for n in ("output", "features", "layers")}
            ctx = changed(ctx, **data.mapped(seen, Tensor.detach))
            grads: Arrays = {n: p.grad for n, p in self._params.items()}
            if self._evolves and remedies.are_finite([*grads.values()]):  # else AMP skips the step
                slots = self._term.evolve(grads, self._values, ctx)
                self._ctx = changed(self._ctx, client={**self._ctx.client, **slots})
            with self._own_loss():
                corrected = self._term.correct(grads, self._values, ctx)
            written = set[int]()
            for n, p in self._params.items():
                if (grad := corrected[n]) is not p.grad:  # a float32 term widens half precision
                    # clipping and optimisers write to it: it must be of this parameter alone
                    shared = grad.untyped_storage().data_ptr() in written or 0 in grad.stride()
                    p.grad = grad.to(p.dtype, copy=shared)
                written.add(p.grad.untyped_storage().data_ptr())
        for p in self._held:
            p.grad = None  # then an optimiser passes it over, weight decay and momentum too
        if (norm := self._ctx.config.get("clip-norm")) is not None:
            clip(self._trained.values(), norm)
        if not self._taken:
            with torch.no_grad():
                grads_of = [cast(Tensor, p.grad) for p in self._params.values()]
                self._begins_finite = remedies.are_finite(grads_of)
                self._would_move = self._begins_finite and any(
                    not torch.equal(p, p - self._ctx.lr * cast(Tensor, p.grad))
                    for p in self._params.values()
                )
        if not self._taken or self._measures.has_used_loss:
            self._differs = self._differs or self._loss_differs()
        if self._differs and self._measures.has_used_loss:
            raise ValueError(self._differs)
        self._optimizer.corrected()
        self._accumulates |= self._passes > 1
        self._step_ctx, self._passes = None, 0
        self._taken += 1

    def _gradient_at(self, params: Arrays) -> Arrays:
        """Return the gradient of the present step's whole loss at other parameters."""
        if (ctx := self._step_ctx) is None or not self._replay.forwards:
            raise RuntimeError("gradient_at is there in `correct` and `evolve`, within a step")
        if self._replay.in_ddp:
            raise RuntimeError(IN_DDP)
        if self._passes > 1:
            raise RuntimeError(ACCUMULATES)
        with self._replay.as_in_forward():
            return self._measures.step_gradient(self._term, ctx, self._taps, params)

    def _train(self, *args: Any, **how: Any) -> Arrays:
        if self._accumulates:
            raise RuntimeError(ACCUMULATES)
        with in_modes(self._modes):
            return self._measures.train(self._ctx, self._replay.again, *args, **how)

    @contextmanager
    def _own_loss(self) -> Iterator[None]:
        """Say of an error, once the method has taken a loss itself, that the loop has another one."""
        try:
            yield
        except Exception as error:
            # behind the optimiser's step a loss that reads parameters is another
            why = self._differs or (self._loss_differs() if self._step_ctx else "")
            if why and self._measures.has_used_loss:
                raise ValueError(why) from error
            raise

    def _loss_differs(self) -> str:
        """Return how the loop's loss in this step differs from `loss_fn`'s; "" if it does not.

        Before the optimiser's step: a loss may read parameters.
        """
        if self._step_loss is None:
            return ""
        base, output, targets = self._step_loss
        own_loss = self._task.loss_fn is None
        if own_loss and not returns_loss(output):
            return ""  # the loop has called the model without the targets
        half = isinstance(output, Tensor) and output.dtype.itemsize < 4
        given = output.float() if half and not own_loss else output  # as autocast takes it
        near = 1e-2 if half else 1e-4
        with torch.no_grad(), self._replay.restored():
            try:
                if wrong := self._lost_label(given, targets):
                    raise ValueError(wrong)
                own = self._task.loss(given, targets)
                differs = not torch.allclose(
                    own.double(), base.double(), near, near**2, equal_nan=True
                )
                # one that draws, or counts its calls, differs from itself
                if not differs or not torch.equal(own, self._task.loss(given, targets)):
                    return ""
                other = f"is {own.item():.6g}"
            except Exception as error:  # whatever loss_fn raises for what it was not made for
                other = f"cannot be taken of the same batch ({error})"
        return (
            f"a step's loss in the loop is {base.item():.6g}, but loss_fn's {other}, and the method takes "
            "losses or gradients itself: give ClientRound, as loss_fn=, the loop's"
        )

    def _lost_label(self, output: Any, targets: Any) -> str:
        """Say which label a GPU's cross-entropy would end the process for; "" if none, or elsewhere."""
        loss_fn = self._task.loss_fn
        if self.device.type == "cpu" or not remedies.is_cross_entropy(loss_fn):
            return ""
        tensors = isinstance(output, Tensor) and isinstance(targets, Tensor)
        return remedies.wrong_label(output, targets, loss_fn) if tensors else ""

    def close(self) -> None:
        """Take the hooks off the model; `finish` does it, so this is for a round that ends before."""
        self._hooks.close()

    def finish(self, steps: int | None = None) -> LocalResult:
        """Return the round's result. Give `steps` if `correct` was not called once per step."""
        if self._finished:
            raise RuntimeError("the round has ended: finish() or reply() was called before")
        self._optimizer.check_left()
        self._go_back()
        self.model.to(self.device)  # a trainer may have moved it
        start = self._ctx.start
        moved = self._has_moved()
        # AMP's scaler leaves steps out; the steps of an optimiser of the loop's own are not counted
        stepped = min(self._taken, self._optimizer.steps or self._taken)
        if not (self._optimizer.steps or self._begins_finite or moved):
            stepped = 0
        if steps is not None:
            WHOLE.check(type(self).__name__, "steps", steps)
        taken = stepped if steps is None else int(steps)
        if not 0 <= taken <= self.num_steps:
            hint = "" if self.num_steps else ": without steps, go straight to reply()"
            raise ValueError(f"{taken} local steps, but the round asked for {self.num_steps}{hint}")
        if any(p.requires_grad for p in self._frozen):
            raise RuntimeError(
                "the loop has set requires_grad=True where it was False: do so before"
            )
        self._finished = True
        if not taken:  # an inactive client: its model and state do not change
            if moved:
                raise RuntimeError("the model has moved, but correct() was never called")
            _write(self._values, start)
        elif self._would_move and not moved:
            warnings.warn(STILL.format(taken), stacklevel=2)  # once, not for each client and round
        delta = {name: v - start[name] for name, v in self._values.items()}
        state = self._optimizer.state() if taken else {}
        ctx = changed(self._ctx, num_steps=taken, optimizer_state=state)
        sent, upload, kept = delta, Slot(), self._kept
        if taken:
            with self._own_loss():
                sent, upload, kept = self._term.finish(delta, ctx)
        if self._differs and self._measures.has_used_loss:
            raise ValueError(self._differs)
        if self._alone is not None:
            upload, kept = upload.get(self._alone, {}), kept[self._alone]
        if sent is not delta:  # else the model already is w_t + delta, unrounded
            _write(self._values, {name: start[name] + sent[name] for name in start})
        for p in self._trained.values():
            p.grad = None
        self._step_loss = None
        self.close()
        none = [torch.zeros((), device="cpu")]
        losses = torch.stack(self._losses or none).reshape(-1).cpu().double()
        sizes = torch.tensor(self._sizes or [0], dtype=torch.float64, device="cpu")
        loss = float(losses @ sizes) / max(sum(self._sizes), 1)
        if not math.isfinite(loss):
            if lost := remedies.not_finite(self._data):
                raise ValueError(lost)
            lost_numbers = not all(v.isfinite().all() for v in self._values.values())
            if lost_numbers and not math.isfinite(float(losses[0])):
                raise ValueError(
                    "the loss of the round's first step is NaN or infinite, and so are the parameters now: "
                    "that comes from the model or the loss, not from the learning rate"
                )
        return LocalResult(
            state={k: v.detach().cpu().clone() for k, v in self.model.state_dict().items()},
            delta=data.to_device(sent, "cpu"),
            upload=data.to_device(upload, "cpu"),
            client=data.to_device(kept, "cpu"),
            num_examples=data.count_examples(self._data),
            num_steps=taken,
            planned_steps=self.planned_steps,
            examples_processed=sum(self._sizes),
            loss=loss,
            rose=has_risen(loss, float(losses[0])),
            output_layer=self._taps.output_layer,
        )


def local_round(
    model: nn.Module, term: Term, train_data: data.Batches, *, optimizer: Factory = None, **how: Any
) -> LocalResult:
    """Train `model` in place from ``w_t`` for one round; parameters as for :class:`LocalTraining`.

    `optimizer` is the client's own ``optimizer(params, lr=lr)``. None: what `config` describes, or SGD. Its
    ``step()`` finds the gradients in ``.grad``; one that demands a closure, as LBFGS's does, gets it.
    """
    training = LocalTraining(model, term, train_data, **how)
    opt = training.optimizer(optimizer)
    closure = inspect.signature(opt.step).parameters.get("closure")
    demanded = closure is not None and closure.default is inspect.Parameter.empty
    taken = 0

    def corrected(batch: tuple[Any, Any]) -> Any:
        opt.zero_grad(set_to_none=True)
        for p in training._trained.values():  # of which the optimiser may hold some
            p.grad = None
        loss = training.objective(*batch, watched=False)
        torch.autograd.backward(loss)
        training.correct()
        return loss

    try:
        for batch in training.batches():
            if demanded:
                opt.step(partial(corrected, batch))  # LBFGS calls it more than once
            else:
                corrected(batch)
                opt.step()
            taken += 1
        return training.finish(taken)
    finally:
        training.close()


@torch.no_grad()
def _write(values: dict[str, Tensor], new: Arrays) -> None:
    """Copy `new` into the model's parameters."""
    for name, v in values.items():
        v.copy_(new[name])
