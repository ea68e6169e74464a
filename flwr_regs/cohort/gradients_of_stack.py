"""The gradients of one step of a stack of clients, under ``torch.func.vmap`` if need be. Plain torch.

Or as one compiled graph: forward, backward, and plain SGD's update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from flwr_regs.abilities import Evolves, Perturbs
from flwr_regs.client.train.batches import mapped
from flwr_regs.cohort.batch_plan import Batch, forked, random_state
from flwr_regs.cohort.member_view import View
from flwr_regs.term import Arrays, Slot

LOG = logging.getLogger("flwr")
KEPT = 20
"""Compiled steps that are kept."""
_STEPS: dict[Hashable, Callable[..., Any] | None] = {}


class Gradient:
    """The corrected gradients of the steps of one round.

    Hooks run under vmap, but for the corrections of terms that are `elementwise`: these broadcast over the
    members.

    Parameters
    ----------
    view : View
    told : dict
        What the members are told, stacked.
    lr : float
        Of an optimiser that is plain SGD, so that a compiled step may make its update; 0 for any other.

    Attributes
    ----------
    moved : bool
        Whether the last gradients are the parameters after such an update.
    """

    def __init__(self, view: View, told: dict[str, Any], lr: float = 0.0) -> None:
        self._view, terms = view, view.term.terms
        self._evolves = any(isinstance(t, Evolves) for t in terms)
        self._perturbs = any(isinstance(t, Perturbs) for t in terms)
        acting = [t for t in terms if t.acts("correct") or isinstance(t, Evolves)]
        watching = self._evolves or any(t.needs for t in terms)
        alike = len(view.alike) == 2 and all(t.elementwise for t in acting)
        slots = told["client"], told["broadcast"]
        self._acts = bool(acting)
        self._together = self._acts and alike and not watching and _broadcasts(slots, view)
        by_member = self._acts and not self._together
        # whether a hook sees the forward pass
        self._reads = watching or by_member or any(t.acts("loss") for t in terms)
        self._lr = 0.0 if self._acts else lr
        self.moved = False

    def of(self, values: Arrays, batch: Batch, row: Any, whole: bool) -> tuple[Any, Any, Any, Slot]:
        """Return (the corrected gradients, the members' losses without those of terms, new buffers, slots).

        The slots are the clients' after the step; ``{}`` if no term `Evolves`.

        Parameters
        ----------
        values : Arrays
            Trained parameters of members whose batches have one shape; they require gradients.
        batch : Batch
        row : dict
            What else is each member's: see :class:`.member_view.View`.
        whole : bool
            Whether these are all members of the stack, with the batches of its first step's form.
        """
        view = self._view
        self._before = random_state(view.device) if self._acts else []
        shown, grads = dict[str, Any](), dict[str, Any]()
        key = None if self._reads or self._perturbs or not whole else view.compiled
        quick = self._compiled(key, values, row["held"], batch) if key else None
        self.moved = bool(quick and self._lr)
        if quick:
            grads, base, buffers = quick
        else:
            there = self._perturbed(values, row) if self._perturbs else values
            losses, base, buffers, shown = self._losses(there, batch, row)
            raw = torch.autograd.grad(losses.sum(), list(there.values()), allow_unused=True)
            grads = dict(zip(values, raw, strict=True))
        for n in view.start:
            grads[n] = torch.zeros_like(values[n]) if grads[n] is None else grads[n]
        if not self._acts:
            return grads, base, buffers, {}
        given, slots = {n: grads[n] for n in view.start}, dict[str, Arrays]()
        at = {n: p.detach() for n, p in values.items()}
        with torch.no_grad():
            corrected = self._at_once(given, at, row["told"]) if self._together else None
            if corrected is None:
                corrected, slots = self._corrected(given, at, batch, row, shown)
        return grads | corrected, base, buffers, slots

    def _compiled(self, key: Hashable, values: Arrays, held: Arrays, batch: Batch) -> Any:
        """Return (gradients, losses, new buffers) of a step without terms; None if it cannot be compiled.

        The graph is made once for a `key` and the names and shapes of what goes in; `key` says what else
        the step depends on. With a learning rate that is not 0, the parameters after a step of plain SGD
        come in place of the gradients. Where the step cannot be traced or there is no compiler, a sentence
        in the log says so.
        """
        view, lr, size = self._view, self._lr, len(batch.leaves[0])
        values = {n: v.detach() for n, v in values.items()}
        held = {**{n: v.expand(size, *v.shape) for n, v in view.rest.items()}, **held}
        rate = torch.full((), lr, dtype=torch.float64, device=view.device)
        given, form = tree_flatten((values, held, batch.leaves, rate))
        key = key, str(form), tuple((tuple(t.shape), t.dtype) for t in given), bool(lr)

        def total(values: Arrays, held: Arrays, leaves: list[Tensor]) -> Any:
            losses, *others = self._losses(values, replace(batch, leaves=leaves), {"held": held})
            return losses.sum(), others

        def step(*given: Tensor) -> Any:
            *inputs, rate = tree_unflatten(given, form)
            grads, (_, (losses, buffers, _)) = grad_and_value(total, has_aux=True)(*inputs)
            moved = [v - rate * grads[n] if lr else grads[n] for n, v in inputs[0].items()]
            return *moved, losses, *buffers.values()

        try:
            if key not in _STEPS:
                if len(_STEPS) == KEPT:
                    del _STEPS[next(iter(_STEPS))]
                copies = [t.clone() for t in given]  # it is run, and may write to buffers
                with forked(view.device):
                    _STEPS[key] = torch._inductor.compile(make_fx(step)(*copies), given)
            if (compiled := _STEPS[key]) is None:
                return None
            out = compiled(*given)
        except Exception as error:  # whatever torch or a compiler raises
            _STEPS[key] = None
            why = str(error).strip().partition("\n")[0]
            LOG.warning("StackedGrid: the step is not compiled: %s", why)
            return None
        parts = iter(out)
        stepped, losses = {n: next(parts) for n in values}, next(parts)
        return stepped, losses, dict(zip(view.buffers, parts, strict=True))

    def _perturbed(self, values: Arrays, row: dict[str, Any]) -> Arrays:
        """Return the parameters at which the terms take the step's loss and gradient."""
        view, values = self._view, {n: p.detach() for n, p in values.items()}
        params = {n: values[n] for n in view.start}
        moved = view.of_all(view.term.point, row["told"], params)
        # clones: leaves of their own, also where a term moves nothing
        return {n: v.clone().requires_grad_() for n, v in {**values, **moved}.items()}

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
                ctx = view.at(row, inputs, targets, view.shown(output))
                loss = view.term.loss(base, {n: values[n] for n in view.start}, ctx)
                shown = {n: v for n in fields if (v := getattr(ctx, n)) is not None}
            return loss, base.detach().float(), buffers, mapped(shown, Tensor.detach)

        rows = row if self._reads else {"held": row["held"]}
        return view.vmapped(objective)(values, batch.leaves, rows)

    def _corrected(self, given: Arrays, values: Arrays, batch: Batch, row: Any, shown: Any) -> Any:
        """Return what the terms make of the gradients, and the clients' slots after the step."""
        view, term = self._view, self._view.term

        def corrected(grads: Arrays, values: Arrays, leaves: Any, row: Any, shown: Any) -> Any:
            pair = batch.rebuilt(leaves)
            params = {n: values[n] for n in view.start}
            others = {n: v for n, v in values.items() if n not in params}
            there = {**row, "held": row["held"] | others}
            again = partial(view.gradient_at, there, pair, self._before)
            ctx = replace(view.at(row, *pair, shown), gradient_at=again)
            slots = term.evolve(grads, params, ctx) if self._evolves else {}
            return term.correct(grads, params, ctx), slots

        return view.vmapped(corrected)(given, values, batch.leaves, row, shown)

    def _at_once(self, given: Arrays, values: Arrays, told: dict[str, Any]) -> Arrays | None:
        """Return what elementwise terms make of all members' gradients; None if they draw numbers.

        Drawn once, these would be the same for all members.
        """
        view = self._view
        before = random_state(view.device)
        ctx = view.context({"client": told["client"], "broadcast": told["broadcast"]})
        params = {n: values[n] for n in view.start}
        corrected = view.term.correct(given, params, ctx)
        if all(map(torch.equal, before, random_state(view.device))):
            return {n: g.expand(given[n].shape) for n, g in corrected.items()}
        self._together = False
        return None


def _broadcasts(all_slots: Sequence[Slot], view: View) -> bool:
    """Whether all that slots hold for each member has a parameter's shape, and so broadcasts with it."""
    return all(
        any(f".{key}".endswith(f".{n}") and v.shape[1:] == p.shape for n, p in view.start.items())
        for slots in all_slots
        for slot in slots.values()
        for key, v in slot.items()
    )
