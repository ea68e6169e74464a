"""A cohort's local training in one set of kernels: clients stacked under ``torch.func.vmap``. Plain torch.

The clients of a stack share the model's build, the method and the optimiser. Their values, batches, slots
and numbers of steps are their own. Nothing is padded: a client that is done leaves the stack, and in each
step the clients whose batches have one shape go together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flwr_regs.abilities import Carries
from flwr_regs.chain import layers_of
from flwr_regs.client.measure.features import FeatureTap, OutputTap, evaluating
from flwr_regs.client.member import seeded
from flwr_regs.client.train.batches import to_device
from flwr_regs.client.train.optimizer import load_state, momentum_of, state_of
from flwr_regs.cohort.batch_plan import Batches, CannotStack
from flwr_regs.cohort.data_functions import over_data
from flwr_regs.cohort.finishing import Held, finish
from flwr_regs.cohort.gradients_of_stack import Gradient, Part
from flwr_regs.cohort.member_view import Member, Shared, View, random_state
from flwr_regs.term import Arrays, Slot

ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "RMSprop"),
    "Rprop",
)
"""torch's optimisers that treat each number alone: for a stack of clients they do what they do for one."""


@dataclass(frozen=True)
class StackedResult:
    """The round of a stack; the first axis of every tensor is that of the members.

    Attributes
    ----------
    state : Arrays
        Trained parameters and buffers at the end.
    delta, upload, client : Arrays, Slot, Slot
        As in :class:`.result.LocalResult`.
    losses : sequence of float
    examples : sequence of int
    output_layer : str or None
    """

    state: Arrays
    delta: Arrays
    upload: Slot
    client: Slot
    losses: Sequence[float]
    examples: Sequence[int]
    output_layer: str | None = None


class Stack:
    """The local training of some clients at once.

    Parameters
    ----------
    shared : Shared
    members : sequence of Member
        Each with at least one step; those with most steps first.
    seed : int
        For what the model draws, such as dropout.

    `run` raises CannotStack, or whatever torch or a hook raises under vmap; the clients then have to train
    one by one. Nothing but the values of ``shared.model`` has changed by then.
    """

    def __init__(self, shared: Shared, members: Sequence[Member], seed: int) -> None:
        self._shared, self._seed = shared, seed
        self._members = members
        self._steps = [len(m.plan) for m in self._members]
        self._rows = len(members)
        self._losses = torch.zeros(self._rows, device=shared.device)
        self._examples = [sum(m.plan.sizes) for m in self._members]
        self._carries = any(isinstance(t, Carries) for t in shared.term.terms)
        self._left: list[Arrays] = []  # the optimiser's state of members that are done, by rows

    def run(self) -> StackedResult:
        """Train for the round."""
        with ExitStack() as stack:
            self._prepare(stack)
            self._open_taps(stack)
            self._optimizer, self._leaves = self._make_optimizer()
            self._begin()
            self._batches = Batches([m.plan for m in self._members], self._shared.device)
            slots = [self._held.told[name] for name in ("client", "broadcast")]
            self._gradient = Gradient(self._view, slots, self._plain_lr())
            for step in range(max(self._steps)):
                self._leave(sum(s > step for s in self._steps))
                self._step(step)
                if not self._gradient.moved:
                    self._optimizer.step()
            return self._finish()

    def probe(self) -> StackedResult:
        """Return a first exchange: the terms' uploads and client slots; plans are passes of the data."""
        shared = self._shared
        with ExitStack() as stack, torch.no_grad():
            self._prepare(stack)
            view = self._view
            view.batch_size = self._members[0].plan.sizes[0]

            def one(told: dict[str, Any], functions: dict[str, Any]) -> Any:
                none = {"num_steps": 0, "planned_steps": 0, "budget_steps": 0, "broadcast": {}}
                return shared.term.probe(view.context(told, **none, **functions))

            passes, held = [m.plan for m in self._members], self._held
            given = passes, held.entries, held.at_start, (held.told,)
            upload, kept = over_data(view, *given, one)
            return StackedResult({}, {}, to_device(upload, "cpu"), to_device(kept, "cpu"), (), ())

    # before the steps

    def _prepare(self, stack: ExitStack) -> None:
        shared = self._shared
        stack.enter_context(seeded(self._seed, shared.device))
        shared.model.to(shared.device).train()
        self._view = self._load()

    def _load(self) -> View:
        """Stack what the members hold; views of the trained parameters are stepped."""
        shared, members, k = self._shared, self._members, self._rows
        parameters = {n: p.detach() for n, p in shared.model.named_parameters()}
        buffers = dict(shared.model.named_buffers())
        own_names = {n for m in members for n in m.private}

        def stacks(of: Arrays, names: Collection[str]) -> Arrays:
            return {n: of_all(n, of[n]) for n in names}

        def of_all(name: str, value: Tensor) -> Tensor:
            one: Tensor = shared.start.get(name, value).to(shared.device)
            if name not in own_names:
                return one.expand(k, *one.shape).clone()
            return torch.stack([m.private.get(name, one).to(shared.device) for m in members])

        values = stacks(parameters, shared.trained)
        inner = stacks(buffers, buffers)
        still = {n: p for n, p in parameters.items() if n not in values}
        private = stacks(still, own_names & still.keys())
        rest = {
            n: shared.start.get(n, p).to(shared.device)
            for n, p in still.items()
            if n not in own_names
        }
        start = {n: shared.start[n].to(shared.device) for n in shared.shared}
        unseen = {n: v for n, v in values.items() if n not in start}
        at_start = {n: t.clone() for n, t in (inner | private | unseen).items()}
        steps = {"budget": self._steps, "planned": [m.planned_steps for m in members]}
        alike = {name: of[0] for name, of in steps.items() if len(set(of)) == 1}
        kind = torch.promote_types(next(iter(start.values())).dtype, torch.float32)
        each: dict[str, Any] = {
            "client": _stacked([m.client for m in members], shared.device),
            "broadcast": _stacked([m.broadcast for m in members], shared.device),
            "id": torch.tensor([m.client_id for m in members], device=shared.device),
            **{
                name: torch.tensor(of, dtype=kind, device=shared.device)
                for name, of in steps.items()
                if name not in alike
            },
        }
        if (counts := self._label_counts()) is not None:
            each["counts"] = counts.to(shared.device)
        self._held = Held(values, inner, private, at_start, each)
        self._of_each = self._held.rows(slice(None))
        return View(shared, start, rest, to_device(shared.broadcast, shared.device), alike)

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
        if not is_elementwise(made):
            raise CannotStack(f"{type(made).__name__} is not known to treat each number alone")
        leaves = {n: nn.Parameter(v) for n, v in self._held.values.items()}
        place = {id(p): leaves[n] for n, p in of_one.items()}
        if any(id(p) not in place for group in made.param_groups for p in group["params"]):
            raise CannotStack("its optimiser holds parameters that are not its model's")
        for group in made.param_groups:
            group["params"] = [place[id(p)] for p in group["params"]]
        self._fused = any(group.get("fused") for group in made.param_groups)
        state, k = dict(made.state), self._rows
        made.state.clear()
        for p, entries in state.items():
            made.state[place[id(p)]] = {
                key: v.expand(k, *v.shape).clone() if _one_each(key, v, p) else v
                for key, v in entries.items()
            }
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

            def begin(told: dict[str, Any]) -> Arrays:
                return term.start(view.start, view.context(told))

            with torch.no_grad():
                for n, p in view.vmapped(begin)(self._held.told).items():
                    self._held.values[n].copy_(p)
        view.batch_size = self._members[0].plan.sizes[0]
        if self._carries:
            self._carry()

    def _carry(self) -> None:
        """Give the optimiser the state with which the terms let it begin."""
        view, term = self._view, self._shared.term

        def begin(told: dict[str, Any]) -> Arrays:
            return term.optimizer_start(view.context(told))

        with torch.no_grad():
            state = view.vmapped(begin)(self._held.told)
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

    def _label_counts(self) -> Tensor | None:
        """Return the members' label counts, with an entry for each class of any of them."""
        counts = [m.label_counts for m in self._members if m.label_counts is not None]
        if len(counts) < len(self._members):
            return None
        classes = max(len(c) for c in counts)
        return torch.stack([nn.functional.pad(c, (0, classes - len(c))) for c in counts])

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
                if isinstance(v, Tensor) and v.shape == p.shape:
                    state[key] = v[:active]
            p.grad = None
            p.data = self._held.values[n][:active]
        self._rows, self._of_each = active, self._held.rows(slice(0, active))

    def _laid_out(self, g: Tensor, p: Tensor) -> Tensor:
        """Return a gradient as an optimiser takes it: a fused one, without a check, by place in memory."""
        if not self._fused or g.stride() == p.stride():
            return g.to(p.dtype)
        return torch.empty_like(p).copy_(g)

    def _step(self, step: int) -> None:
        """Put the corrected gradients of a step into the parameters."""
        forms = [m.plan.forms[step] for m in self._members[: self._rows]]
        if len(set(forms)) == 1:
            grads = self._gradients(step)
            for n, p in self._leaves.items():
                if self._gradient.moved and (moved := grads[n]) is not None:
                    self._held.values[n] = p.data = moved
                else:
                    p.grad = None if (g := grads[n]) is None else self._laid_out(g, p)
            self._clip()
            return
        parts: dict[Any, list[int]] = {}
        for row, form in enumerate(forms):
            parts.setdefault(form, []).append(row)
        for p in self._leaves.values():
            p.grad = torch.zeros_like(p)
        for number, rows in enumerate(parts.values()):
            for n, g in self._gradients(
                step, torch.tensor(rows, device=self._shared.device)
            ).items():
                leaf = self._leaves[n]
                if number and (g is None) != (leaf.grad is None):
                    raise CannotStack(f"the loss depends on {n} in some batches only")
                if g is None:
                    leaf.grad = None
                elif leaf.grad is not None:
                    leaf.grad[rows] = g.to(leaf.dtype)
        self._clip()

    def _gradients(self, step: int, rows: Tensor | None = None) -> dict[str, Tensor | None]:
        """Return the corrected gradients of some rows (default: all left), whose batches have one shape."""
        values, held = {n: p.detach() for n, p in self._leaves.items()}, self._held
        chosen: Sequence[int] = range(self._rows)
        of_each = self._of_each
        if rows is not None:
            chosen, of_each = rows.tolist(), held.rows(rows)
            values = {n: v[rows] for n, v in values.items()}
        batch = self._batches.of(step, chosen)
        plan = self._members[chosen[0]].plan
        whole = len(chosen) == len(self._members) and plan.forms[step] == plan.forms[0]
        leaves = {n: v.requires_grad_() for n, v in values.items()}
        part = Part(leaves, batch, of_each, whole)
        grads, losses, new, slots = self._gradient.of(part)
        where = slice(0, self._rows) if rows is None else rows
        self._losses[where] += losses * plan.sizes[step]
        self._evolve(slots, where)
        for n, b in new.items():
            if b.shape[1:] != held.buffers[n].shape[1:] or b.dtype != held.buffers[n].dtype:
                raise CannotStack(f"its model changes the shape or dtype of its buffer {n}")
            held.buffers[n][where] = b
        return grads

    def _evolve(self, slots: Slot, where: slice | Tensor) -> None:
        """Put the slots of some members after a step in place of those before it."""
        kept = self._held.told["client"]
        for t, slot in slots.items():
            for key, value in slot.items():
                if key not in kept.setdefault(t, {}):  # the first step: all members take it
                    kept[t][key] = value.new_zeros(len(self._members), *value.shape[1:])
                kept[t][key][where] = value
        if slots:
            self._of_each = self._held.rows(slice(0, self._rows))

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
        view, values = self._view, self._held.values
        delta = {n: values[n] - view.start[n] for n in view.start}
        if self._carries:
            self._carried()
            self._held.told["optimizer"] = {
                key: torch.cat([part[key] for part in self._left]) for key in self._left[0]
            }
        sent, uploads, slots = finish(view, self._held, self._members, delta)
        if sent is not delta:
            for n, start in view.start.items():
                values[n].copy_(start + sent[n])
        losses = (self._losses.double().cpu() / torch.tensor(self._examples)).tolist()
        layer = None if view.tap is None else view.tap.layer
        state, sent, uploads, slots = to_device((self._held.entries, sent, uploads, slots), "cpu")
        return StackedResult(state, sent, uploads, slots, losses, self._examples, layer)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimiser is known to do for a stack of clients what it does for one."""
    kind = type(optimizer)
    return kind.__module__.partition(".")[0] == "torch" and kind.__name__ in ELEMENTWISE


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy of a parameter with its attributes, which a factory may read."""
    made = nn.Parameter(parameter.detach().clone())
    vars(made).update(vars(parameter))
    return made


def _one_each(key: str, value: Any, p: Tensor) -> bool:
    """Whether an entry of an optimiser's state has a number for each of the parameter."""
    return isinstance(value, Tensor) and key != "step" and value.shape == p.shape


def _stacked(slots: Sequence[Slot], device: torch.device) -> Slot:
    """Return the members' slots as one, with a first axis over them."""
    out: Slot = {}
    for t, first in slots[0].items():
        each = [slot[t] for slot in slots]
        out[t] = {k: torch.stack([s[k] for s in each]) for k in first}
    return to_device(out, device)  # type: ignore[no-any-return]
