"""A cohort's local training in one set of kernels: clients stacked under ``torch.func.vmap``. Plain torch.

The clients of a stack share the model's build, the method and the optimiser. Their values, batches, slots
and numbers of steps are their own. Nothing is padded: a client that is done leaves the stack, and in each
step the clients whose batches have one shape go together.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter, mul
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from flwr_regs.abilities import Carries
from flwr_regs.client.local_training import has_risen
from flwr_regs.client.measure.classifier import Taps, evaluating
from flwr_regs.client.measure.context_functions import OVER_DATA
from flwr_regs.client.measure.fisher import MEMORY, Layers, find_layers, sample_loss
from flwr_regs.client.train.batches import forked, mapped, seeded, tensors, to_device
from flwr_regs.client.train.optimizer import (
    check_direction,
    load_state,
    momentum_of,
    state_of,
    total_norm,
)
from flwr_regs.cohort import batch_plan
from flwr_regs.cohort.batch_plan import Batch, Batches, CannotStack, Plan, random_state
from flwr_regs.cohort.member_view import AsksFor, Member, OneMember, View, as_tensors, in_shape
from flwr_regs.term import Arrays, Slot, changed
from flwr_regs.wire import keys

LOG = logging.getLogger("flwr")
ELEMENTWISE = "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta ASGD RMSprop Rprop"
"""torch's optimisers that treat each number alone: for a stack of clients they do what they do for one."""
OPTIONS = {"cpp.threads": 1, "fallback_random": True}
"""The compiler's. In its threads, an index out of range would end the process. With torch's own random
numbers, a step draws the same ones, compiled or not."""
KEPT = 60
"""Entries of `_STEPS` that are kept."""
_STEPS: dict[Hashable, Any] = {}
"""What is compiled: a graph -> its step; what a step was traced for -> the step; a training whose steps do
not compile -> None."""


@dataclass(frozen=True)
class StackedResult:
    """The round of a stack; the first axis of every tensor is that of the members.

    Attributes
    ----------
    state : Arrays
        The model's parameters and buffers at the end, by their first names.
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
    view : View
        What they share.
    members : sequence of Member
        Each with at least one step; those with most steps first.

    The first one's seed is that of all that the model draws, such as dropout.

    `run` raises CannotStack, or whatever torch or a hook raises under vmap; the clients then have to train
    one by one. Nothing but the values of ``view.model`` has changed by then.
    """

    def __init__(self, view: View, members: Sequence[Member]) -> None:
        self._view, self._members, terms = replace(view), members, view.term.terms
        self._steps = [len(m.plan) for m in members]
        self._rows = len(members)
        self._seen: list[tuple[Sequence[int], Tensor]] = []  # rows, and their losses of a step
        self._carries = bool(view.term.able(Carries))
        self._left: list[Arrays] = []  # the optimiser's state of members that are done, by rows
        self._evolves, self._perturbs = (view.term.overriding(h) for h in ("evolve", "point"))
        acting = [t for t in terms if t.acts("correct") or t in self._evolves]
        # whether a hook is to see what the forward pass makes
        self._watches = bool(self._evolves) or any(t.needs for t in terms)
        self._reads = self._watches or any(t.acts("loss") for t in terms)
        self._acts, self._elementwise = bool(acting), all(t.elementwise for t in acting)

    def run(self) -> StackedResult:
        """Train for the round."""
        with ExitStack() as stack:
            self._load(stack)
            self._open_taps(stack)
            self._optimizer, self._leaves = self._make_optimizer()
            self._begin()
            self._batches = Batches([m.plan for m in self._members], self._view.device)
            for step in range(max(self._steps)):
                self._leave(sum(s > step for s in self._steps))
                self._step(step)
            return self._finish()

    def probe(self) -> StackedResult:
        """Return a first exchange: the terms' uploads and client slots; plans are passes of the data."""
        with ExitStack() as stack, torch.no_grad():
            self._load(stack)
            view = self._view
            view.same["batch_size"] = self._members[0].plan.sizes[0]

            def one(told: dict[str, Any], **functions: Any) -> Any:
                none = {"num_steps": 0, "planned_steps": 0, "broadcast": {}}
                slots = view.term.probe(view.context(told, **none, **functions))
                return tuple(as_tensors(some, view.device) for some in slots)

            ended = self._over_data([m.plan for m in self._members], one)
            return StackedResult({}, {}, *to_device(ended, "cpu"))

    def _over_data(self, plans: list[Plan], one: Any, *given: Any, training: bool = False) -> Any:
        """Return what ``one(*given, told, **functions)`` is for each member, stacked.

        The functions are those over a member's data, of which `plans` are one pass; if `training`,
        ``train`` alone, over the batches of the round's steps. `given` are nested dicts of stacked tensors.
        """
        view, rows = self._view, len(plans)
        if not training:  # Fisher information looks for linear layers
            view = replace(view, precision=None, as_products=False)
        rest = {n: v.expand(rows, *v.shape) for n, v in view.rest.items()}
        row = self._own | {"held": {**rest, **self._values, **self._own["held"]}}
        parts: list[Any] = []
        order: list[int] = []
        for some, batches in batch_plan.together(plans, view.device):
            taken = mapped((row, given), itemgetter(some))
            how: dict[str, Any] = {"memory": MEMORY // len(some)}
            if not training:
                how["layers"] = _layers(view, batches[0], taken[0]["held"])

            def member(leaves: Any, taken: Any, how: Any = how, batches: Any = batches) -> Any:
                own, given = taken
                pairs = [b.rebuilt(parts) for b, parts in zip(batches, leaves, strict=True)]
                measured = OneMember(view, own, pairs, **how)
                functions = {name: getattr(measured, name) for name in OVER_DATA}
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
        back = torch.tensor(order, device=view.device).argsort()
        return tree_map(lambda *rows: torch.cat(rows)[back], *parts)

    # before the steps

    def _load(self, stack: ExitStack) -> None:
        """Stack what the members hold; views of the trained parameters are stepped."""
        view, members, device = self._view, self._members, self._view.device
        configs = [m.asked.message.config for m in members]
        stack.enter_context(seeded(configs[0][keys.SEED_KEY], device))
        view.model.to(device).train()
        buffers = dict(view.model.named_buffers())
        entries = {n: p.detach() for n, p in view.model.named_parameters()} | buffers
        entries = {n: view.entries.get(n, v).to(device) for n, v in entries.items()}
        own = members[0].private  # the others have the same names
        stacked = {
            n: torch.stack([m.private[n].to(device) for m in members])
            if n in own
            else v.expand(self._rows, *v.shape).clone()
            for n, v in entries.items()
            if n in own or n in buffers or n in view.trained
        }
        # by name, the first axis that of the members: trained parameters, and a row of `View`
        self._values: Arrays = {n: stacked[n] for n in view.trained}
        held = {n: v for n, v in stacked.items() if n not in self._values}
        view.start = {n: entries[n] for n in view.trained if n not in own}
        view.broadcast = to_device(view.broadcast, device)
        view.rest = {n: v for n, v in entries.items() if n not in stacked}
        view.buffers = [*buffers]
        view.as_products = view.precision is None and view.randomness == "different"
        told: dict[str, Any] = {
            "client": _stacked([m.begun.slots for m in members]),
            "broadcast": _stacked([m.broadcast for m in members]),
            "client_id": torch.tensor([c.get(keys.CLIENT_KEY, -1) for c in configs], device=device),
        }
        counts = [m.label_counts for m in members if m.label_counts is not None]
        if counts:  # all members have them, or none
            told["label_counts"] = pad_sequence(counts, batch_first=True)
        numbers = {"num_steps": self._steps, "planned_steps": [m.planned_steps for m in members]}
        same = {name: of[0] for name, of in numbers.items() if len(set(of)) == 1}
        view.same = {**view.same, "start": view.start, "loss_fn": view.loss, **same}
        told |= {n: torch.tensor(of, device=device) for n, of in numbers.items() if n not in same}
        unseen = {n: v for n, v in self._values.items() if n not in view.start}
        at_start = {n: t.clone() for n, t in (held | unseen).items()}
        told = to_device(told, device)
        self._own: dict[str, Any] = {"held": held, "told": told, "at_start": at_start}
        self._of_each = self._own_of(slice(None))

    def _own_of(self, some: Any) -> dict[str, Any]:
        """Return what is some members' own: views, of a slice."""
        return mapped(self._own, lambda t: t[some])  # type: ignore[no-any-return]

    def _open_taps(self, stack: ExitStack) -> None:
        view = self._view
        view.taps = taps = Taps(view.model, view.term.terms, view.classifier)
        stack.callback(taps.close)
        if taps.output_layer is not None:
            inputs, targets = to_device(self._members[0].plan.batch(0), view.device)
            with evaluating(view.model):
                taps.check(view.task.output(view.model, inputs, targets))

    def _make_optimizer(self) -> tuple[torch.optim.Optimizer, Arrays]:
        """Return the client's optimiser over the stacked parameters, and these.

        It is made for one client, so that a factory which looks at the parameters sees their shapes; then
        the stacked ones take their places.
        """
        view = self._view
        named = dict(view.model.named_parameters())
        of_one = {n: named[n] for n in view.trained}
        before = random_state(view.device)
        made = view.make(list(of_one.values()), lr=view.same["lr"])
        if not all(map(torch.equal, before, random_state(view.device))):
            raise CannotStack("its optimiser's factory draws random numbers")
        if any(t.acts("start") for t in view.term.terms) or self._values.keys() - view.start.keys():
            others = [nn.Parameter(1 - p.detach(), p.requires_grad) for p in of_one.values()]
            other = view.make(others, lr=view.same["lr"])
            if _settings(other, others) != _settings(made, [*of_one.values()]):
                raise CannotStack("its optimiser's factory looks at values that differ by member")
        check_direction(made, view.term)
        kind = type(made)
        if kind.__module__.partition(".")[0] != "torch" or kind.__name__ not in ELEMENTWISE.split():
            raise CannotStack(f"{kind.__name__} is not known to treat each number alone")
        leaves = {n: nn.Parameter(v) for n, v in self._values.items()}
        place = {id(p): leaves[n] for n, p in of_one.items()}
        for group in made.param_groups:
            if any(id(p) not in place for p in group["params"]):
                raise CannotStack("its optimiser holds parameters that are not its model's")
            group["params"] = [place[id(p)] for p in group["params"]]
            if group.get("fused"):  # that takes, without a check, numbers by their place in memory
                group["fused"] = False
        for p in [*made.state]:
            state = made.state[place[id(p)]] = made.state.pop(p)
            for key, v in state.items():
                if key != "step" and _is_like(v, p):
                    state[key] = v.expand(self._rows, *v.shape).clone()
        return made, leaves

    def _begin(self) -> None:
        """Let the terms choose where the steps start, and with what state of the optimiser."""
        view, term, told = self._view, self._view.term, self._own["told"]
        view.same["momentum"] = momentum_of(self._optimizer, view.same["lr"])
        if any(t.acts("start") for t in term.terms):
            for n, p in view.of_all(partial(term.start, view.start), told).items():
                self._values[n].copy_(p)
        view.same["batch_size"] = self._members[0].plan.sizes[0]
        slots = told["client"], told["broadcast"]
        alike = told.keys().isdisjoint(("num_steps", "planned_steps"))
        self._together = alike and self._elementwise and not self._watches
        self._together = self._together and all(_broadcasts(s, view.start) for s in slots)
        self._reads |= self._acts and not self._together
        self._lr = 0.0 if self._acts or view.compiled is None else self._plain_lr()
        if not self._carries:
            return
        state = view.of_all(term.optimizer_start, told)
        for key, value in state.items():
            entry, _, name = key.partition(".")
            scalar = entry == "step" or entry.endswith("#")
            if not scalar and value.shape == self._leaves[name].shape:
                continue
            if (value != value[0]).any():
                raise CannotStack(f"the members' optimisers begin with differing entries {entry}")
            state[key] = value[0]
        load_state(self._optimizer, self._leaves, state)

    def _plain_lr(self) -> float:
        """Return the learning rate of an optimiser that is plain SGD; 0 for any other."""
        group, *others = self._optimizer.param_groups
        extras = ("momentum", "weight_decay", "maximize", "nesterov")
        plain = type(self._optimizer) is torch.optim.SGD and not any(group[k] for k in extras)
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        own = vars(self._optimizer)  # a schedule of the factory's replaces or hooks the step
        plain = plain and "step" not in own and not any(own[name] for name in hooks)
        alone = not others and len(group["params"]) == len(self._leaves)
        fits = plain and alone and "clip-norm" not in self._view.same["config"]
        return float(group["lr"]) if fits else 0.0

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
        """Take a step: the members whose batches have one shape together."""
        parts: dict[Any, list[int]] = {}
        if self._batches.alike:
            parts[None] = [*range(self._rows)]
        else:
            for row, member in enumerate(self._members[: self._rows]):
                parts.setdefault(member.plan.forms[step], []).append(row)
        for rows in parts.values():
            where: Any = slice(0, self._rows)
            if len(parts) > 1:
                where = torch.tensor(rows, device=self._view.device)
            places = set[int]()
            grads = self._gradients(step, rows, where)
            for n, g in grads.items():
                p = self._leaves[n]
                if len(parts) == 1:
                    # clipping and optimisers write to it: it must be of this parameter alone
                    place = g.untyped_storage().data_ptr()
                    p.grad = g.to(p.dtype, copy=place in places or 0 in g.stride())
                    places.add(place)
                else:
                    p.grad = torch.zeros_like(p) if rows[0] == 0 else p.grad
                    p.grad[where] = g.to(p.dtype)
        if grads:  # else a compiled step has updated the parameters
            self._clip()
            self._optimizer.step()

    def _gradients(self, step: int, rows: Sequence[int], where: Any) -> Any:
        """Return the corrected gradients of some rows, whose batches have one shape.

        Hooks run under vmap, but for the corrections of terms that are `elementwise`: these broadcast over
        the members.
        """
        view, held = self._view, self._own["held"]
        plan, batch = self._members[rows[0]].plan, self._batches.of(step, rows)
        row = self._of_each if isinstance(where, slice) else self._own_of(where)
        values = {n: p.detach()[where].requires_grad_() for n, p in self._leaves.items()}
        self._before = random_state(view.device) if self._acts else []
        # of all members, with batches of the first step's form
        whole = len(rows) == len(self._members) and plan.forms[step] == plan.forms[0]
        plain = whole and not self._reads and not self._perturbs
        compiled = view.compiled if plain else None
        with unwritten("parameters", values.values()), unwritten("batches", batch.leaves):
            grads, losses, buffers, shown = self._raw(values, batch, row, compiled)
            if unused := [n for n, g in grads.items() if g is None and n not in view.start]:
                # alone, an optimiser passes these over
                raise CannotStack(f"the loss does not depend on {unused}")
            grads = {n: torch.zeros_like(values[n]) if g is None else g for n, g in grads.items()}
            if self._acts:
                given = {n: grads[n] for n in view.start}
                if view.randomness == "same":
                    # what is drawn like a gradient lies in memory as it does
                    given = {n: g.contiguous() for n, g in given.items()}
                at = {n: p.detach() for n, p in values.items()}
                with torch.no_grad():
                    corrected = self._at_once(given, at, row["told"]) if self._together else None
                    if corrected is None:
                        corrected, slots = self._corrected(given, at, batch, row, shown)
                        self._evolve(slots, where)
                grads |= corrected
        self._seen.append((rows, losses))
        for n, b in buffers.items():
            if b.shape[1:] != held[n].shape[1:] or b.dtype != held[n].dtype:
                raise CannotStack(f"its model changes the shape or dtype of its buffer {n}")
            held[n][where] = b
        return grads

    def _raw(self, values: Arrays, batch: Batch, row: Any, compiled: Any) -> Any:
        """Return (gradients, losses without those of terms, new buffers, what terms see of the pass)."""
        view, there = self._view, values
        if compiled and (quick := self._compiled(compiled, values, row["held"], batch)):
            return quick
        if self._perturbs:
            params = {n: values[n].detach() for n in view.start}

            def point(params: Arrays, ctx: Any) -> Arrays:
                return in_shape(view.term.point(params, ctx), params)

            moved = view.of_all(point, row["told"], params)
            # clones: leaves of their own, also where a term moves nothing
            there = {n: moved.get(n, v).detach().clone() for n, v in values.items()}
            there = {n: v.requires_grad_() for n, v in there.items()}
        losses, base, buffers, shown = self._losses(there, batch, row)
        raw = torch.autograd.grad(losses.sum(), list(there.values()), allow_unused=True)
        return dict(zip(values, raw, strict=True)), base, buffers, shown

    def _losses(self, values: Arrays, batch: Batch, row: dict[str, Any]) -> Any:
        """Return (whole losses, losses, new buffers, what the forward pass has shown the terms)."""
        view = self._view
        fields = ("output", "start_output", "features", "layers") if self._acts else ()

        def objective(values: Arrays, leaves: list[Tensor], row: dict[str, Any]) -> Any:
            inputs, targets = batch.rebuilt(leaves)
            given = {**row["held"], **values}
            output = view.output(view.model, inputs, targets, given)
            base, shown = view.loss(output, targets), dict[str, Any]()
            loss, buffers = base, {n: given[n] for n in view.buffers}
            if self._reads:
                ctx = view.at(row, inputs, targets, {"output": output, **view.taps.seen()})
                loss = view.term.loss(base, {n: values[n] for n in view.start}, ctx)
                shown = {n: v for n in fields if (v := getattr(ctx, n)) is not None}
            return loss, base.detach(), buffers, mapped(shown, Tensor.detach)

        rows = row if self._reads else {"held": row["held"]}
        return view.vmapped(objective)(values, batch.leaves, rows)

    def _compiled(self, whose: Any, values: Arrays, held: Arrays, batch: Batch) -> Any:
        """Return (gradients, losses, new buffers, {}) of a step without terms; None if it is not compiled.

        It is traced once for `whose`, (training, build), and the names and forms of what goes in. So what
        it reads beside its arguments, such as a global, is that of this training. Where the optimiser is
        plain SGD and no term acts, the graph itself updates the parameters, and there are no gradients.
        Where the step cannot be traced or there is no compiler, a sentence in the log says so, and no other
        step of the training is tried. Raises CannotStack for a step that fails while it updates parameters:
        some may hold new values.
        """
        training, build = whose
        if training in _STEPS:
            return None
        view, lr, size = self._view, self._lr, len(batch.leaves[0])
        read = len(view.misread)
        values = {n: v.data for n, v in values.items()}  # the graph may write to them
        held = {**{n: v.expand(size, *v.shape) for n, v in view.rest.items()}, **held}
        rate = torch.full((), lr, dtype=torch.float64, device=view.device)
        given, form = tree_flatten((values, held, batch.leaves, rate))
        key = whose, self._members[0].plan.forms[0], str(form), _forms(given), bool(lr)

        def total(values: Arrays, held: Arrays, leaves: list[Tensor]) -> Any:
            losses, *others = self._losses(values, replace(batch, leaves=leaves), {"held": held})
            return losses.sum(), others

        def step(*given: Tensor) -> Any:
            *inputs, rate = tree_unflatten(given, form)
            with unwritten("parameters", inputs[0].values()):
                grads, (_, (losses, buffers, _)) = grad_and_value(total, has_aux=True)(*inputs)
            misread = torch.stack([losses.new_zeros((), dtype=torch.bool), *view.misread[read:]])
            del view.misread[read:]
            if lr:
                for n, g in grads.items():
                    inputs[0][n].sub_(rate * g)
                grads = {}
            return losses, misread.any(), *buffers.values(), *grads.values()

        updating = False
        try:
            if build is None:
                raise TypeError("its model or loss cannot be pickled, so changes would not be seen")
            if key not in _STEPS:
                while len(_STEPS) >= KEPT:
                    del _STEPS[next(iter(_STEPS))]
                copies = [t.clone() for t in given]  # it is run, and may write to buffers
                with forked(view.device):
                    _STEPS[key] = _compiled_once(make_fx(step)(*copies), given)
            updating = bool(lr)
            out = iter(_STEPS[key](*given))
        except Exception as error:  # whatever torch or a compiler raises
            _STEPS[training] = None
            del view.misread[read:]
            why = str(error).strip().partition("\n")[0]
            LOG.warning("StackedGrid: the step is not compiled: %s", why)
            if updating:
                raise CannotStack("a compiled step has failed within its update") from error
            return None
        losses = next(out)
        view.misread.append(next(out))
        buffers = {n: next(out) for n in view.buffers}
        grads = {} if lr else dict(zip(values, out, strict=True))
        return grads, losses, buffers, {}

    def _corrected(self, given: Arrays, values: Arrays, batch: Batch, row: Any, shown: Any) -> Any:
        """Return what the terms make of the gradients, and the clients' slots after the step."""
        view, term = self._view, self._view.term

        def corrected(grads: Arrays, values: Arrays, leaves: Any, row: Any, shown: Any) -> Any:
            pair = batch.rebuilt(leaves)
            params = {n: values[n] for n in view.start}
            others = {n: v for n, v in values.items() if n not in params}
            there = {**row, "held": row["held"] | others}
            ctx = view.at(row, *pair, shown)
            again = partial(view.gradient_at, there, ctx, self._before)
            ctx = changed(ctx, gradient_at=again)
            slots = term.evolve(grads, params, ctx) if self._evolves else {}
            return term.correct(grads, params, ctx), as_tensors(slots, view.device)

        return view.vmapped(corrected)(given, values, batch.leaves, row, shown)

    def _at_once(self, given: Arrays, values: Arrays, told: dict[str, Any]) -> Arrays | None:
        """Return what elementwise terms make of all members' gradients; None if they draw numbers.

        Drawn once, these would be the same for all members.
        """
        view = self._view
        before = random_state(view.device)
        own = {"client": told["client"], "broadcast": told["broadcast"]}
        ctx = view.context(own, client_id=None)  # it is no number of all members
        corrected = view.term.correct(given, {n: values[n] for n in view.start}, ctx)
        if all(map(torch.equal, before, random_state(view.device))):
            return {n: g.expand(given[n].shape) for n, g in corrected.items()}
        self._together = False
        return None

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
        norm = self._view.same["config"].get("clip-norm")
        grads = [p.grad for p in self._leaves.values() if p.grad is not None]
        if norm is None or not grads:
            return
        totals = vmap(partial(total_norm, foreach=False))(grads)
        scale = (norm / (totals + 1e-6)).clamp(max=1.0)
        for g in grads:
            g.mul_(scale.view(-1, *[1] * (g.ndim - 1)).to(g.dtype))

    # after the steps

    def _finish(self) -> StackedResult:
        """Run the terms' `finish`, and return what came of the round."""
        view, values, told = self._view, self._values, self._own["told"]
        delta = {n: values[n] - view.start[n] for n in view.start}
        if self._carries:
            self._carried()
            told["optimizer_state"] = tree_map(lambda *parts: torch.cat(parts), *self._left)
        changes = False

        def end(delta: Arrays, told: dict[str, Any], **functions: Any) -> Any:
            nonlocal changes
            sent, *slots = view.term.finish(delta, view.context(told, **functions))
            if changes := sent is not delta:
                sent = in_shape(sent, delta)
            return sent, *(as_tensors(some, view.device) for some in slots)

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
        seen = torch.tensor([row for rows, _ in self._seen for row in rows], device="cpu")
        each = torch.cat([losses for _, losses in self._seen]).cpu()[seen.argsort(stable=True)]
        by_row = [of.tolist() for of in torch.split(each, self._steps)]
        sizes = [m.plan.sizes for m in self._members]
        losses = [sum(map(mul, *of)) / sum(of[1]) for of in zip(by_row, sizes, strict=True)]
        rose = [has_risen(loss, of[0]) for of, loss in zip(by_row, losses, strict=True)]
        ended = {**values, **self._own["held"]}, sent if changes else delta, uploads, slots
        state, sent, uploads, slots = to_device(ended, "cpu")
        rest = to_device(view.rest, "cpu")  # the same for all
        state |= {n: v.expand(len(self._members), *v.shape) for n, v in rest.items()}
        return StackedResult(state, sent, uploads, slots, losses, rose, view.taps.output_layer)


def _compiled_once(graph: torch.fx.GraphModule, given: Any) -> Any:
    """Return a step's graph, compiled; an equal one is compiled once."""
    code = (getattr(module, "code", "") for module in graph.modules())
    constants = [t.detach().flatten().view(torch.uint8) for t in graph.state_dict().values()]
    key = *code, _forms(given), *(t.cpu().numpy().tobytes() for t in constants)
    if key not in _STEPS:
        for module in graph.modules():  # the user may change the tensors that it holds
            held = {**module._buffers, **module._parameters}
            module._parameters.clear()
            module._buffers |= {n: t.detach().clone() for n, t in held.items() if t is not None}
        _STEPS[key] = torch._inductor.compile(graph, given, options=OPTIONS)
    return _STEPS[key]


def _forms(given: Iterable[Tensor]) -> Hashable:
    """Return the shapes, strides, dtypes and devices of tensors."""
    return tuple((tuple(t.shape), t.stride(), t.dtype, str(t.device)) for t in given)


@contextmanager
def unwritten(what: str, given: Iterable[Tensor]) -> Iterator[None]:
    """Raise CannotStack if the block writes to these tensors.

    They may be copies. A client alone finds what it has written in its parameters and its data.
    """
    before = [(t, t._version) for t in given]
    yield
    if any(t._version != version for t, version in before):
        raise CannotStack(f"its model or loss writes to its {what}")


def _stacked(slots: Sequence[Slot]) -> Any:
    """Return the members' slots, which have the same entries, as one."""
    return {
        t: {key: torch.stack([slot[t][key] for slot in slots]) for key in first}
        for t, first in slots[0].items()
    }


def _broadcasts(slots: Slot, start: Arrays) -> bool:
    """Whether all that slots hold for each member has a parameter's shape, and so broadcasts with it."""
    return all(
        any(f".{key}".endswith(f".{n}") and v.shape[1:] == p.shape for n, p in start.items())
        for slot in slots.values()
        for key, v in slot.items()
    )


def _is_like(value: Any, p: Tensor) -> bool:
    """Whether an entry of an optimiser's state has a number for each of the parameter."""
    return isinstance(value, Tensor) and value.shape == p.shape


def _settings(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> str:
    """Return an optimiser's groups as text: their settings, and the places of their parameters."""
    place = {id(p): i for i, p in enumerate(params)}
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        group["params"] = [place.get(id(p)) for p in group["params"]]
    return str(groups)


def _layers(view: View, batch: Batch, held: Arrays) -> Layers:
    """Return the layers that :func:`.fisher.find_layers` finds in the first member; they hold `held`."""
    model, first = view.model, {n: t[0] for n, t in held.items()}
    task: Any = replace(view, rest={**view.rest, **first})
    values = {n: first[n] for n, p in model.named_parameters() if p.requires_grad}
    pair = batch.rebuilt([t[0] for t in batch.leaves])
    with evaluating(model):
        sample = [t[0, 0] for t in batch.leaves]
        return find_layers(model, partial(sample_loss, model, task, {}, pair), values, sample)


def _again(pairs: Sequence[Any], steps: int) -> Iterator[tuple[Any, Any]]:
    if steps > len(pairs):
        raise CannotStack("a term trains for more steps than the round has")
    return islice(pairs, steps)
