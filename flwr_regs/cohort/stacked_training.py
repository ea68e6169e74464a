"""A cohort's local training in one set of kernels: clients stacked under ``torch.func.vmap``. Plain torch.

The clients of a stack share the model's build, the method and the optimiser. Their values, batches, slots
and numbers of steps are their own. Nothing is padded: a client that is done leaves the stack, and in each
step the clients whose batches have one shape go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map

from flwr_regs.abilities import Carries
from flwr_regs.chain import layers_of
from flwr_regs.client.local_training import has_risen
from flwr_regs.client.measure.classifier import FeatureTap, OutputTap, attributes_kept, evaluating
from flwr_regs.client.measure.fisher import MEMORY, Layers, find_layers, sample_loss
from flwr_regs.client.train.batches import mapped, seeded, tensors, to_device
from flwr_regs.client.train.optimizer import load_state, momentum_of, state_of
from flwr_regs.cohort.batch_plan import Batch, Batches, CannotStack, Plan, random_state, together
from flwr_regs.cohort.gradients_of_stack import Gradient
from flwr_regs.cohort.member_view import MEASURED, AsksFor, Member, OneMember, Shared, View
from flwr_regs.term import Arrays, Slot
from flwr_regs.wire import keys

ELEMENTWISE = "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta ASGD RMSprop Rprop"
"""torch's optimisers that treat each number alone: for a stack of clients they do what they do for one."""


@dataclass(frozen=True)
class StackedResult:
    """The round of a stack; the first axis of every tensor is that of the members.

    Attributes
    ----------
    state : Arrays
        Trained parameters and buffers at the end.
    delta, upload, client : Arrays, Slot, Slot
        As in :class:`.local_training.LocalResult`.
    losses : sequence of float
    rose : sequence of bool
        As in :class:`.local_training.LocalResult`.
    output_layer : str or None
    """

    state: Arrays
    delta: Arrays
    upload: Slot
    client: Slot
    losses: Sequence[float] = ()
    rose: Sequence[bool] = ()
    output_layer: str | None = None


class Stack:
    """The local training of some clients at once.

    Parameters
    ----------
    shared : Shared
    members : sequence of Member
        Each with at least one step; those with most steps first.

    The first one's seed is that of all that the model draws, such as dropout.

    `run` raises CannotStack, or whatever torch or a hook raises under vmap; the clients then have to train
    one by one. Nothing but the values of ``shared.model`` has changed by then.
    """

    def __init__(self, shared: Shared, members: Sequence[Member]) -> None:
        self._shared, self._members = shared, members
        self._steps = [len(m.plan) for m in members]
        self._rows = len(members)
        self._losses, self._first = torch.zeros(2, self._rows, device=shared.device)
        self._carries = any(isinstance(t, Carries) for t in shared.term.terms)
        self._left: list[Arrays] = []  # the optimiser's state of members that are done, by rows

    def run(self) -> StackedResult:
        """Train for the round."""
        with ExitStack() as stack:
            self._load(stack)
            self._open_taps(stack)
            self._optimizer, self._leaves = self._make_optimizer()
            self._begin()
            self._batches = Batches([m.plan for m in self._members], self._shared.device)
            self._gradient = Gradient(self._view, self._own["told"], self._plain_lr())
            for step in range(max(self._steps)):
                self._leave(sum(s > step for s in self._steps))
                self._step(step)
                if not self._gradient.moved:
                    self._optimizer.step()
            return self._finish()

    def probe(self) -> StackedResult:
        """Return a first exchange: the terms' uploads and client slots; plans are passes of the data."""
        term = self._shared.term
        with ExitStack() as stack, torch.no_grad():
            self._load(stack)
            view = self._view
            view.batch_size = self._members[0].plan.sizes[0]

            def one(told: dict[str, Any], **functions: Any) -> Any:
                none = {"num_steps": 0, "planned_steps": 0, "budget_steps": 0, "broadcast": {}}
                return term.probe(view.context(told, **none, **functions))

            ended = self._over_data([m.plan for m in self._members], one)
            return StackedResult({}, {}, *to_device(ended, "cpu"))

    def _over_data(self, plans: list[Plan], one: Any, *given: Any, training: bool = False) -> Any:
        """Return what ``one(*given, told, **functions)`` is for each member, stacked.

        The functions are those over a member's data, of which `plans` are one pass; if `training`,
        ``train`` alone, over the batches of the round's steps. `given` are nested dicts of stacked tensors.
        """
        view, shared, rows = self._view, self._shared, len(plans)
        if not training:  # Fisher information looks for linear layers
            view = replace(view, precision=None, as_products=False)
        rest = {n: v.expand(rows, *v.shape) for n, v in view.rest.items()}
        row = self._own | {"held": {**rest, **self._values, **self._own["held"]}}
        parts: list[Any] = []
        order: list[int] = []
        for some, batches in together(plans, shared.device):
            taken = mapped((row, given), itemgetter(some))
            how: dict[str, Any] = {"memory": MEMORY // len(some)}
            if not training:
                how["layers"] = _layers(view, batches[0], taken[0]["held"])

            def member(leaves: Any, taken: Any, how: Any = how, batches: Any = batches) -> Any:
                own, given = taken
                pairs = [b.rebuilt(parts) for b, parts in zip(batches, leaves, strict=True)]
                measured = OneMember(view, own, pairs, **how)
                functions = {name: getattr(measured, name) for name in MEASURED}
                if training:
                    ctx = view.context(own["told"], num_steps=len(pairs))
                    functions = {"train": partial(measured.train, ctx, partial(_again, pairs))}
                    functions["num_steps"] = len(pairs)
                return one(*given, own["told"], **functions)

            leaves = [b.leaves for b in batches]
            with unwritten("batches", tensors(leaves)):
                parts.append(view.vmapped(member)(leaves, taken))
            order += some
        if len(parts) == 1:
            return parts[0]
        back = torch.tensor(order, device=shared.device).argsort()
        return tree_map(lambda *rows: torch.cat(rows)[back], *parts)

    # before the steps

    def _load(self, stack: ExitStack) -> None:
        """Stack what the members hold; views of the trained parameters are stepped."""
        shared, members, k = self._shared, self._members, self._rows
        stack.enter_context(seeded(members[0].plan.seed, shared.device))
        shared.model.to(shared.device).train()
        buffers = dict(shared.model.named_buffers())
        entries = {n: p.detach() for n, p in shared.model.named_parameters()} | buffers
        entries = {n: shared.entries.get(n, v).to(shared.device) for n, v in entries.items()}
        own_names = {n for m in members for n in m.private}

        def of_all(name: str) -> Tensor:
            one = entries[name]
            if name not in own_names:
                return one.expand(k, *one.shape).clone()
            return torch.stack([m.private.get(name, one).to(shared.device) for m in members])

        start = {n: entries[n] for n in shared.trained if n in shared.entries}
        # by name, the first axis that of the members: trained parameters, and a row of `View`
        self._values: Arrays = {n: of_all(n) for n in shared.trained}
        changing = (own_names | buffers.keys()) - self._values.keys()
        held = {n: of_all(n) for n in entries if n in changing}
        rest = {n: v for n, v in entries.items() if n not in held and n not in self._values}
        unseen = {n: v for n, v in self._values.items() if n not in start}
        steps = {"budget": self._steps, "planned": [m.planned_steps for m in members]}
        alike = {name: of[0] for name, of in steps.items() if len(set(of)) == 1}
        kind = torch.promote_types(next(iter(start.values())).dtype, torch.float32)
        slots = {"client": [m.client for m in members], "broadcast": [m.broadcast for m in members]}
        told: dict[str, Any] = to_device(
            {k: _stacked(of) for k, of in slots.items()}, shared.device
        )
        ids = [m.asked.message.config.get(keys.CLIENT_KEY, -1) for m in members]
        told["id"] = torch.tensor(ids, device=shared.device)
        for name in steps.keys() - alike.keys():
            told[name] = torch.tensor(steps[name], dtype=kind, device=shared.device)
        counts = [m.label_counts for m in members if m.label_counts is not None]
        if counts:  # all members have them, or none
            told["counts"] = pad_sequence(counts, batch_first=True).to(shared.device)
        at_start = {n: t.clone() for n, t in (held | unseen).items()}
        self._own: dict[str, Any] = {"held": held, "told": told, "at_start": at_start}
        self._of_each = self._own_of(slice(None))
        how: dict[str, Any] = {"start": start, "rest": rest, "buffers": [*buffers], "alike": alike}
        products = shared.precision is None and shared.randomness == "different"
        self._view = View(**vars(shared), **how, as_products=products)

    def _own_of(self, some: Any) -> dict[str, Any]:
        """Return what is some members' own: views, of a slice."""
        return mapped(self._own, lambda t: t[some])  # type: ignore[no-any-return]

    def _open_taps(self, stack: ExitStack) -> None:
        shared = self._shared
        terms = shared.term.terms
        if any("features" in t.needs for t in terms):
            self._view.tap = tap = stack.enter_context(FeatureTap(shared.model, shared.classifier))
            inputs, targets = to_device(self._members[0].plan.batch(0), shared.device)
            with evaluating(shared.model):
                tap.check(shared.task.output(shared.model, inputs, targets))
        for name in layers_of(terms):
            self._view.layers[name] = stack.enter_context(OutputTap(shared.model, name))

    def _make_optimizer(self) -> tuple[torch.optim.Optimizer, Arrays]:
        """Return the client's optimiser over the stacked parameters, and these.

        It is made for one client, so that a factory which looks at the parameters sees their shapes; then
        the stacked ones take their places.
        """
        shared = self._shared
        named = dict(shared.model.named_parameters())
        of_one = {n: _copied(named[n]) for n in shared.trained}
        before = random_state(shared.device)
        made = shared.make(list(of_one.values()), lr=shared.lr)
        if not all(map(torch.equal, before, random_state(shared.device))):
            raise CannotStack("its optimiser's factory draws random numbers")
        kind = type(made)
        if kind.__module__.partition(".")[0] != "torch" or kind.__name__ not in ELEMENTWISE.split():
            raise CannotStack(f"{kind.__name__} is not known to treat each number alone")
        leaves = {n: nn.Parameter(v) for n, v in self._values.items()}
        place = {id(p): leaves[n] for n, p in of_one.items()}
        for group in made.param_groups:
            if any(id(p) not in place for p in group["params"]):
                raise CannotStack("its optimiser holds parameters that are not its model's")
            group["params"] = [place[id(p)] for p in group["params"]]
        self._fused = any(group.get("fused") for group in made.param_groups)
        for p in [*made.state]:
            state = made.state[place[id(p)]] = made.state.pop(p)
            for key, v in state.items():
                if key != "step" and _is_like(v, p):
                    state[key] = v.expand(self._rows, *v.shape).clone()
        return made, leaves

    def _plain_lr(self) -> float:
        """Return the learning rate of an optimiser that is plain SGD; 0 for any other."""
        (group, *others), shared = self._optimizer.param_groups, self._shared
        extras = ("momentum", "weight_decay", "maximize", "nesterov")
        plain = type(self._optimizer) is torch.optim.SGD and not any(group[k] for k in extras)
        alone = not others and len(group["params"]) == len(self._leaves)
        fits = plain and alone and "clip-norm" not in shared.config
        return float(group["lr"]) if fits else 0.0

    def _begin(self) -> None:
        """Let the terms choose where the steps start."""
        view, term = self._view, self._shared.term
        view.momentum = momentum_of(self._optimizer)
        if any(t.acts("start") for t in term.terms):
            begin = view.of_all(partial(term.start, view.start), self._own["told"])
            for n, p in begin.items():
                self._values[n].copy_(p)
        view.batch_size = self._members[0].plan.sizes[0]
        if self._carries:
            self._carry()

    def _carry(self) -> None:
        """Give the optimiser the state with which the terms let it begin."""
        state = self._view.of_all(self._shared.term.optimizer_start, self._own["told"])
        for key, value in state.items():
            entry, _, name = key.partition(".")
            scalar = entry == "step" or entry.endswith("#")
            if not scalar and value.shape == self._leaves[name].shape:
                continue
            if (value != value[0]).any():
                raise CannotStack(f"the members' optimisers begin with differing entries {entry}")
            state[key] = value[0]
        load_state(self._optimizer, self._leaves, state)

    def _carried(self, first: int = 0) -> None:
        """Note the optimiser's state of the members from a row on."""
        state = state_of(self._optimizer, self._leaves)
        rows = self._rows - first
        self._left.insert(0, {k: v[first:] if v.ndim else v.expand(rows) for k, v in state.items()})

    # a step

    def _leave(self, active: int) -> None:
        """Let the members go whose steps are done: their rows stay as they are."""
        if active == self._rows:
            return
        if self._carries:
            self._carried(active)
        for n, p in self._leaves.items():
            state = self._optimizer.state.get(p, {})
            for key, v in state.items():
                if _is_like(v, p):
                    state[key] = v[:active]
            p.data = self._values[n][:active]
        self._rows, self._of_each = active, self._own_of(slice(0, active))

    def _step(self, step: int) -> None:
        """Put the corrected gradients of a step into the parameters."""
        parts: dict[Any, list[int]] = {}
        if self._batches.alike:
            parts[None] = [*range(self._rows)]
        else:
            for row, member in enumerate(self._members[: self._rows]):
                parts.setdefault(member.plan.forms[step], []).append(row)
        for number, rows in enumerate(parts.values()):
            where: Any = slice(0, self._rows)
            if not (alone := len(parts) == 1):
                where = torch.tensor(rows, device=self._shared.device)
            for n, g in self._gradients(step, rows, where).items():
                p = self._leaves[n]
                if number and (g is None) != (p.grad is None):
                    raise CannotStack(f"the loss depends on {n} in some batches only")
                if g is None:
                    p.grad = None
                elif self._gradient.moved:
                    self._values[n] = p.data = g
                elif alone and not (self._fused and g.stride() != p.stride()):
                    p.grad = g.to(p.dtype)
                else:  # a fused optimiser takes, without a check, numbers by their place in memory
                    grad = torch.zeros_like(p) if p.grad is None or not number else p.grad
                    grad[where] = g.to(p.dtype)
                    p.grad = grad
        self._clip()

    def _gradients(self, step: int, rows: Sequence[int], where: Any) -> Any:
        """Return the corrected gradients of some rows, whose batches have one shape."""
        values = {n: p.detach()[where].requires_grad_() for n, p in self._leaves.items()}
        own = self._of_each if isinstance(where, slice) else self._own_of(where)
        plan, held = self._members[rows[0]].plan, self._own["held"]
        whole = len(rows) == len(self._members) and plan.forms[step] == plan.forms[0]
        batch = self._batches.of(step, rows)
        with unwritten("parameters", values.values()), unwritten("batches", batch.leaves):
            grads, losses, new, slots = self._gradient.of(values, batch, own, whole)
        self._losses[where] += losses * plan.sizes[step]
        if not step:
            self._first[where] = losses
        self._evolve(slots, where)
        for n, b in new.items():
            if b.shape[1:] != held[n].shape[1:] or b.dtype != held[n].dtype:
                raise CannotStack(f"its model changes the shape or dtype of its buffer {n}")
            held[n][where] = b
        return grads

    def _evolve(self, slots: Slot, where: Any) -> None:
        """Put the slots of some members after a step in place of those before it."""
        kept = self._own["told"]["client"]
        for t, slot in slots.items():
            for key, value in slot.items():
                if key not in kept.setdefault(t, {}):  # the first step: all members take it
                    kept[t][key] = value.new_zeros(len(self._members), *value.shape[1:])
                kept[t][key][where] = value
        if slots:
            self._of_each = self._own_of(slice(0, self._rows))

    def _clip(self) -> None:
        """Scale each member's gradients down to the config's norm: see :func:`.optimizer.clip`."""
        norm = self._shared.config.get("clip-norm")
        grads = [p.grad for p in self._leaves.values() if p.grad is not None]
        if norm is None or not grads:
            return
        wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
        # a member's number has no axis of its own
        wide = [w.unsqueeze(-1).flatten(1) for w in wide]
        each = torch.stack([torch.linalg.vector_norm(w, dim=1) for w in wide])
        scale = (norm / (torch.linalg.vector_norm(each, dim=0) + 1e-6)).clamp(max=1.0)
        for g in grads:
            g.mul_(scale.view(-1, *[1] * (g.ndim - 1)).to(g.dtype))

    # after the steps

    def _finish(self) -> StackedResult:
        """Run the terms' `finish`, and return what came of the round."""
        view, values, told = self._view, self._values, self._own["told"]
        delta = {n: values[n] - view.start[n] for n in view.start}
        if self._carries:
            self._carried()
            told["optimizer"] = tree_map(lambda *parts: torch.cat(parts), *self._left)
        changes = False

        def end(delta: Arrays, told: dict[str, Any], **functions: Any) -> Any:
            nonlocal changes
            sent, *kept = self._shared.term.finish(delta, view.context(told, **functions))
            changes = sent is not delta
            return sent, *kept

        with torch.no_grad():
            try:  # most hooks need no data
                ended = view.vmapped(end)(delta, told)
            except AsksFor as asked:
                training = asked.args[0] == "train"
                plans = [m.plan if training else m.plan.one_pass() for m in self._members]
                ended = self._over_data(plans, end, delta, training=training)
        sent, uploads, slots = ended
        if changes:
            for n, start in view.start.items():
                values[n].copy_(start + sent[n])
        examples = [sum(m.plan.sizes) for m in self._members]
        losses = (self._losses.double().cpu() / torch.tensor(examples)).tolist()
        rose = [*map(has_risen, losses, self._first.tolist())]
        layer = None if view.tap is None else view.tap.layer
        ended = {**values, **self._own["held"]}, sent if changes else delta, uploads, slots
        state, sent, uploads, slots = to_device(ended, "cpu")
        return StackedResult(state, sent, uploads, slots, losses, rose, layer)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Leave a model's attributes, parameters and buffers as they were, also those that do not travel."""
    held = [*model.parameters(), *model.buffers()]
    before = [(t.data, t.detach().clone()) for t in held]
    try:
        with attributes_kept(model):
            yield
    finally:
        for tensor, (data, value) in zip(held, before, strict=True):
            tensor.data = data.copy_(value)


@contextmanager
def unwritten(what: str, given: Iterable[Tensor]) -> Iterator[None]:
    """Raise CannotStack if the block writes to these tensors.

    They may be copies. A client alone finds what it has written in its parameters and its data.
    """
    before = [(t, t._version) for t in given]
    yield
    if any(t._version != version for t, version in before):
        raise CannotStack(f"its model or loss writes to its {what}")


def _stacked(slots: Sequence[Slot]) -> Slot:
    """Return the members' slots, which have the same entries, as one."""
    return {
        t: {key: torch.stack([of[t][key] for of in slots]) for key in slot}
        for t, slot in slots[0].items()
    }


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy of a parameter with its attributes, which a factory may read."""
    made = nn.Parameter(parameter.detach().clone())
    vars(made).update(vars(parameter))
    return made


def _is_like(value: Any, p: Tensor) -> bool:
    """Whether an entry of an optimiser's state has a number for each of the parameter."""
    return isinstance(value, Tensor) and value.shape == p.shape


def _layers(view: View, batch: Batch, held: Arrays) -> Layers:
    """Return the layers that :func:`.fisher.find_layers` finds in the first member; they hold `held`."""
    model, first = view.model, {n: t[0] for n, t in held.items()}
    task, sample = view.holding(first), [t[0, 0] for t in batch.leaves]
    values = {n: first[n] for n, p in model.named_parameters() if p.requires_grad}
    pair = batch.rebuilt([t[0] for t in batch.leaves])
    with evaluating(model):
        return find_layers(model, partial(sample_loss, model, task, {}, pair), values, sample)


def _again(pairs: Sequence[Any], steps: int) -> Iterator[tuple[Any, Any]]:
    if steps > len(pairs):
        raise CannotStack("a term trains for more steps than the round has")
    return islice(pairs, steps)
