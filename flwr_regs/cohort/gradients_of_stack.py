"""The gradients of one step of a stack of clients, under ``torch.func.vmap`` if need be. Plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flwr_regs.abilities import Evolves, Perturbs
from flwr_regs.client.train.batches import mapped
from flwr_regs.cohort.batch_plan import Batch
from flwr_regs.cohort.compiled import compiled_step
from flwr_regs.cohort.member_view import View, random_state, set_random_state
from flwr_regs.term import Arrays, Slot


@dataclass(frozen=True)
class Part:
    """The members whose batches of a step have one shape; the first axis of all tensors is theirs.

    Attributes
    ----------
    values : Arrays
        Trained parameters; they require gradients.
    batch : Batch
    rows : dict
        What else is each member's: see :class:`.member_view.View`.
    whole : bool
        Whether these are all members of the stack, with the batches of its first step's form.
    """

    values: Arrays
    batch: Batch
    rows: dict[str, Any]
    whole: bool = False


class Gradient:
    """The corrected gradients of the steps of one round.

    Hooks run under vmap, but for the corrections of terms that are `elementwise`: these broadcast over the
    members.

    Parameters
    ----------
    view : View
    slots : sequence of Slot
        The members' own slots, stacked.
    lr : float
        Of an optimiser that is plain SGD, so that a compiled step may make its update; 0 for any other.

    Attributes
    ----------
    moved : bool
        Whether the last gradients are the parameters after such an update.
    """

    def __init__(self, view: View, slots: Sequence[Slot], lr: float = 0.0) -> None:
        self._view, self._lr = view, lr
        terms, steps = view.shared.term.terms, len(view.alike)
        self._acting = [t for t in terms if t.acts("correct") or isinstance(t, Evolves)]
        self._evolves = any(isinstance(t, Evolves) for t in terms)
        watching = any(t.needs for t in terms) or self._evolves
        alike = all(t.elementwise for t in self._acting) and steps == 2 and _broadcasts(slots, view)
        self._together = bool(self._acting) and alike and not watching
        self._watches = watching or any(t.acts("loss") for t in terms)
        self._perturbs = any(isinstance(t, Perturbs) for t in terms)
        self.moved = False

    @property
    def _reads(self) -> bool:
        """Whether a hook sees the forward pass."""
        return self._watches or (bool(self._acting) and not self._together)

    def of(self, part: Part) -> tuple[dict[str, Tensor | None], Tensor, Arrays, Slot]:
        """Return (the corrected gradients, the members' losses without those of terms, new buffers, slots).

        The slots are the clients' after the step; ``{}`` if no term `Evolves`.
        """
        view, values, acting = self._view, part.values, bool(self._acting)
        before = random_state(view.shared.device) if acting else []
        shown: dict[str, Any] = {}
        grads: dict[str, Any]
        lr = 0.0 if acting else self._lr
        key = None if self._reads or self._perturbs or not part.whole else view.shared.compiled
        quick = compiled_step(key, view, values, part.rows, part.batch, lr) if key else None
        self.moved = bool(quick and lr)
        if quick:
            grads, base, buffers = quick
        else:
            there = replace(part, values=self._perturbed(part)) if self._perturbs else part
            losses, base, buffers, shown = self._losses(there)
            raw = torch.autograd.grad(losses.sum(), list(there.values.values()), allow_unused=True)
            grads = dict(zip(values, raw, strict=True))
        for n in view.start:
            grads[n] = torch.zeros_like(values[n]) if grads[n] is None else grads[n]
        if not acting:
            return grads, base, buffers, {}
        given, slots = {n: grads[n] for n in view.start}, dict[str, Arrays]()
        with torch.no_grad():
            corrected = self._at_once(given, part) if self._together else None
            if corrected is None:
                corrected, slots = self._corrected(given, part, shown, before)
        return grads | corrected, base, buffers, slots

    def _perturbed(self, part: Part) -> Arrays:
        """Return the parameters at which the terms take the step's loss and gradient."""
        view, values = self._view, {n: p.detach() for n, p in part.values.items()}

        def point(values: Arrays, row: dict[str, Any]) -> Arrays:
            return view.shared.term.point(values, view.context(row["told"]))

        with torch.no_grad():
            moved = view.vmapped(point)({n: values[n] for n in view.start}, part.rows)
        # clones: leaves of their own, also where a term moves nothing
        return {n: v.clone().requires_grad_() for n, v in {**values, **moved}.items()}

    def _losses(self, part: Part) -> tuple[Tensor, Tensor, Arrays, dict[str, Any]]:
        """Return (whole losses, losses, new buffers, what the forward pass has shown the terms)."""
        view, shared, acting = self._view, self._view.shared, bool(self._acting)

        def objective(values: Arrays, leaves: list[Tensor], row: dict[str, Any]) -> Any:
            inputs, targets = part.batch.rebuilt(leaves)
            buffers = dict(row["buffers"])
            output = view.call(inputs, targets, {**row["private"], **values}, buffers)
            base = view.loss(output, targets)
            if not self._reads:
                return base, base.detach().float(), buffers, {}
            ctx = view.at(row, inputs, targets, view.shown(output))
            loss = shared.term.loss(base, {n: values[n] for n in view.start}, ctx)
            shown: dict[str, Any] = {"layers": ctx.layers if acting else {}}
            for name in ("output", "start_output", "features") if acting else ():
                if (value := getattr(ctx, name)) is not None:
                    shown[name] = value
            return loss, base.detach().float(), buffers, mapped(shown, Tensor.detach)

        rows = part.rows if self._reads else {n: part.rows[n] for n in ("buffers", "private")}
        return view.vmapped(objective)(part.values, part.batch.leaves, rows)  # type: ignore[no-any-return]

    def _corrected(
        self, given: Arrays, part: Part, shown: dict[str, Any], before: Sequence[Tensor]
    ) -> tuple[Arrays, Slot]:
        """Return what the terms make of the gradients, and the clients' slots after the step."""
        values = {n: p.detach() for n, p in part.values.items()}
        view = self._view

        def corrected(
            grads: Arrays, values: Arrays, leaves: list[Tensor], row: dict[str, Any], shown: Any
        ) -> tuple[Arrays, Slot]:
            inputs, targets = part.batch.rebuilt(leaves)
            private = {n: v for n, v in values.items() if n not in view.start}
            rest = row | {"private": row["private"] | private}
            again = partial(view.gradient_at, rest, inputs, targets, before)
            ctx = replace(view.at(row, inputs, targets, shown), gradient_at=again)
            term, params = view.shared.term, {n: values[n] for n in view.start}
            slots = term.evolve(grads, params, ctx) if self._evolves else {}
            return term.correct(grads, params, ctx), slots

        args = part.batch.leaves, part.rows, shown
        return view.vmapped(corrected)(given, values, *args)  # type: ignore[no-any-return]

    def _at_once(self, given: Arrays, part: Part) -> Arrays | None:
        """Return what elementwise terms make of all members' gradients; None if they draw numbers.

        Drawn once, these would be the same for all members.
        """
        view, told = self._view, part.rows["told"]
        before = random_state(view.shared.device)
        params = {n: part.values[n].detach() for n in view.start}
        ctx = view.context({"client": told["client"], "broadcast": told["broadcast"]})
        corrected = view.shared.term.correct(given, params, ctx)
        if all(map(torch.equal, before, random_state(view.shared.device))):
            return {n: g.expand(given[n].shape) for n, g in corrected.items()}
        set_random_state(view.shared.device, before)
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
