"""What the terms make of a step's gradients; on a CPU slice by slice. Plain torch.

A correction such as ``g + μ (v − w_t)`` reads and writes whole parameters several times, and for large
ones a processor waits for its memory. So terms that are `elementwise` correct one slice after another, and
what they compute in between stays in the cache. Each entry is computed as before: no bit changes.

SGD's own step reads the parameters and the gradients once more, so it is taken on each slice as well, if
torch's class takes it and nobody looks at the gradients in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch import nn

from flwr_regs.chain import Chain, gradient_after, own_context
from flwr_regs.client.train.sliced_sgd import SlicedSGD
from flwr_regs.term import Arrays, ClientContext, Slot, Term, changed

SLICE = 2**17
"""Entries of a slice for each of torch's threads, which divide an operation into parts of this size. The
arrays of a correction fit in a core's cache, and the Python calls weigh little."""

Params = dict[str, nn.Parameter]
Piece = dict[str, int]
"""The parameters of which slices are corrected together, each with the number of its slice."""


class Corrections:
    """The corrections of one round's gradients, in place.

    Parameters
    ----------
    term : Term
        The method.
    params : dict[str, nn.Parameter]
        What the terms see of the model.
    ctx : ClientContext
        The round's context, with `start` and the slots.
    """

    def __init__(self, term: Term, params: Params, ctx: ClientContext) -> None:
        self._term, self._params = term, params
        terms = term.overriding("correct") if isinstance(term, Chain) else [term]
        self._acts = any(type(t).correct is not Term.correct for t in terms)
        self._runs = [(e, tuple(run)) for e, run in groupby(terms, lambda t: t.elementwise)]
        on_cpu = all(p.device.type == "cpu" for p in params.values())
        self._slice = SLICE * torch.get_num_threads()
        large = sum(p.numel() for p in params.values()) > 2 * self._slice
        self._in_slices = on_cpu and large and any(e for e, _ in self._runs)
        if self._in_slices:
            self._cut = {
                n for n, p in params.items() if p.numel() > self._slice and p.is_contiguous()
            }
            self._pieces = list(self._made_pieces())
            own = own_context if isinstance(term, Chain) else lambda ctx, t: ctx
            self._cuts = {t.name: self._made_cuts(own(ctx, t)) for t in terms if t.elementwise}

    def __call__(self, ctx: ClientContext, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Correct the gradients of a step, given its context.

        A parameter that the loss does not depend on has gradient zero, as under ``torch.func.grad``.
        With an `optimizer`, its step may be taken as well: the gradients are then None.
        """
        for p in self._params.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if not self._acts:
            return
        grads: Arrays = {n: p.grad for n, p in self._params.items()}
        values: Arrays = {n: p.detach() for n, p in self._params.items()}
        if self._in_slices and all(g.layout == torch.strided for g in grads.values()):
            self._by_runs(grads, values, ctx, optimizer)
        else:
            self._give(self._term.correct(grads, values, ctx))

    def _give(self, grads: Arrays) -> None:
        """Give the parameters their corrected gradients."""
        for n, p in self._params.items():
            if grads[n] is not p.grad:
                p.grad = grads[n].to(p.dtype)  # a float32 term widens a half-precision gradient

    def _by_runs(
        self,
        grads: Arrays,
        values: Arrays,
        ctx: ClientContext,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Correct the gradients; elementwise neighbours go slice by slice together."""
        at = {n: self._parts(n, v) for n, v in values.items()}
        left: tuple[Term, ...] = ()
        for number, (elementwise, run) in enumerate(self._runs, 1):
            if not elementwise:
                here = changed(ctx, gradient_at=gradient_after(left, ctx)) if left else ctx
                grads = Chain(run).correct(grads, values, here)
            elif number < len(self._runs):
                grads = self._gathered(self._sliced(run, grads, at, ctx))
            elif step := SlicedSGD.of(optimizer, self._params, self._parts):
                self._stepped(step, self._sliced(run, grads, at, ctx), at)
                return
            else:
                self._written(self._sliced(run, grads, at, ctx))
                return
            left = (*left, *run)
        self._give(grads)

    def _sliced(
        self,
        run: Sequence[Term],
        grads: Arrays,
        at: Mapping[str, Sequence[Any]],
        ctx: ClientContext,
    ) -> Iterator[tuple[str, int, Any]]:
        """Yield (parameter, number, slice) of what a run of elementwise terms makes of the gradients."""
        before = {n: self._parts(n, g) for n, g in grads.items()}
        for k, piece in enumerate(self._pieces):
            part: Arrays = {n: before[n][i] for n, i in piece.items()}
            here: Arrays = {n: at[n][i] for n, i in piece.items()}
            for t in run:
                part = t.correct(part, here, changed(ctx, **self._cuts[t.name][k]))
            for n, i in piece.items():
                yield n, i, part[n]

    def _gathered(self, made: Iterable[tuple[str, int, Any]]) -> Arrays:
        """Return corrected gradients as whole arrays."""
        parts: dict[str, list[Any]] = {n: [] for n in self._params}
        for n, _, part in made:
            parts[n].append(part)
        return {
            n: torch.cat(p).view(self._params[n].shape) if n in self._cut else p[0]
            for n, p in parts.items()
        }

    def _written(self, made: Iterable[tuple[str, int, Any]]) -> None:
        """Write corrected gradients into the model's own."""
        own = {n: self._own(n, p) for n, p in self._params.items()}
        for n, i, part in made:
            if part.data_ptr() != own[n][i].data_ptr():  # else the terms changed nothing
                own[n][i].copy_(part)

    @torch.no_grad()
    def _stepped(
        self,
        step: SlicedSGD,
        made: Iterable[tuple[str, int, Any]],
        at: Mapping[str, Sequence[Any]],
    ) -> None:
        """Take the optimiser's step along corrected gradients; the model's own are then None."""
        for n, i, part in made:
            step(n, i, at[n][i], part.to(self._params[n].dtype))
        for p in self._params.values():
            p.grad = None

    def _parts(self, name: str, array: Any) -> Sequence[Any]:
        """Return the slices of an array of a parameter's shape: views, if it is contiguous."""
        return array.reshape(-1).split(self._slice) if name in self._cut else (array,)

    def _own(self, name: str, p: nn.Parameter) -> Sequence[Any]:
        """Return the slices of the model's own gradient, in memory that can be cut."""
        if name in self._cut and not p.grad.is_contiguous():  # type: ignore[union-attr]
            p.grad = p.grad.contiguous()  # type: ignore[union-attr]
        return self._parts(name, p.grad)

    def _made_pieces(self) -> Iterator[Piece]:
        """Yield the pieces: a slice of a large parameter, or several small parameters together."""
        together: Piece = {}
        size = 0
        for name, p in self._params.items():
            if name in self._cut:
                yield from ({name: i} for i in range(-(-p.numel() // self._slice)))
                continue
            if together and size + p.numel() > self._slice:
                yield together
                together, size = {}, 0
            together[name] = 0
            size += p.numel()
        if together:
            yield together

    def _made_cuts(self, ctx: ClientContext) -> list[Slot]:
        """Return, for each piece, the fields that differ from those of `ctx`, a term's own context."""
        cuts: list[Slot] = [{"gradient_at": _no_gradient} for _ in self._pieces]
        for field in ("start", "broadcast", "client"):
            arrays: Slot = getattr(ctx, field)
            owners = {key: owner(key, a, self._params) for key, a in arrays.items()}
            shared = {key: arrays[key] for key, name in owners.items() if name is None}
            parts: dict[str, Slot] = {}
            for key, name in owners.items():
                if name is not None:
                    parts.setdefault(name, {})[key] = self._parts(name, arrays[key])
            for piece, cut in zip(self._pieces, cuts, strict=True):
                mine = [(parts.get(n, {}), i) for n, i in piece.items()]
                cut[field] = shared | {key: a[i] for found, i in mine for key, a in found.items()}
        return cuts


def owner(key: str, array: Any, params: Mapping[str, Any]) -> str | None:
    """Return the parameter of which the entry `key` of a slot is cut as well, if any.

    That is the one with the longest name that `key` is, or ends with behind a dot; of the same shape.
    """
    words = key.split(".")
    names = (".".join(words[i:]) for i in range(len(words)))
    shape = getattr(array, "shape", None)
    return next((n for n in names if n in params and params[n].shape == shape), None)


def _no_gradient(params: Arrays) -> NoReturn:
    raise RuntimeError(
        "gradient_at is not there for a term that is elementwise: its `correct` sees slices of the "
        "parameters; leave `elementwise` out of its class"
    )
