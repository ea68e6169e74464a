"""Several terms as one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flwr_regs.method import Arrays, ClientContext, ServerContext, Slot, Term


@dataclass(frozen=True)
class Chain(Term):
    """Several terms as one; each slot holds the terms' own slots under their names.

    Losses, corrections, `finish` and `release` run left to right, server updates right to left.
    """

    name: ClassVar[str] = "chain"
    terms: tuple[Term, ...] = ()

    def private(self, names: Collection[str]) -> set[str]:
        return {name for t in self.terms for name in t.private(names)}

    @property
    def ternary(self) -> tuple[bool, bool]:
        return any(t.ternary[0] for t in self.terms), any(t.ternary[1] for t in self.terms)

    def config(self) -> dict[str, Any]:
        return {key: value for t in self.terms for key, value in t.config().items()}

    def init(self, params: Arrays) -> Slot:
        return {t.name: t.init(params) for t in self.terms}

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        return {t.name: t.broadcast(server[t.name], ctx) for t in self.terms}

    def recover(self, step: Arrays, lr: float) -> Slot | None:
        return {t.name: t.recover(step, lr) or {} for t in self.terms}

    def probe(self, ctx: ClientContext) -> tuple[Slot, Slot]:
        pairs = {t.name: t.probe(_own(ctx, t)) for t in self.terms if t.probes}
        return {n: u for n, (u, _) in pairs.items()}, {n: c for n, (_, c) in pairs.items()}

    def answer(self, probes: Mapping[int, Slot]) -> dict[int, Slot]:
        out: dict[int, Slot] = {pid: {} for pid in probes}
        for t in self.terms:
            if t.probes:
                own = {pid: uploads.get(t.name, {}) for pid, uploads in probes.items()}
                for pid, slot in t.answer(own).items():
                    out[pid][t.name] = slot
        return out

    def client_optimizer(self, optimizer: Any) -> Any:
        for t in self.terms:
            optimizer = t.client_optimizer(optimizer)
        return optimizer

    def start(self, params: Arrays, ctx: ClientContext) -> Arrays:
        for t in self.terms:
            params = t.start(params, _own(ctx, t))
        return params

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        for t in self.terms:
            base = t.loss(base, params, _own(ctx, t))
        return base

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        for t in self.terms:
            grads = t.correct(grads, params, _own(ctx, t))
        return grads

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        upload: Slot = {}
        client: Slot = {}
        for t in self.terms:
            delta, upload[t.name], client[t.name] = t.finish(delta, _own(ctx, t))
        return delta, upload, client

    def check(self, upload: Slot, params: Arrays, probing: bool = False) -> None:
        """Check each term's own upload, naming it: those of probing terms in a probe, else the others."""
        mine = {t.name: t for t in self.terms if t.probes == probing}
        if unknown := sorted(set(upload) - set(mine)):
            raise ValueError(f"uploads of {unknown}, expected {sorted(mine)} at most")
        for name, t in mine.items():
            try:
                t.check(upload.get(name, {}), params)
            except ValueError as error:
                raise ValueError(f"upload of '{name}': {error}") from error

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        new: Slot = {}
        for t in reversed(self.terms):
            own = {k: upload.get(t.name, {}) for k, upload in uploads.items()}
            new[t.name], delta = t.update(server[t.name], delta, own, ctx)
        return new, delta

    def release(self, server: Slot, step: Arrays, ctx: ServerContext) -> tuple[Slot, Arrays]:
        new: Slot = {}
        for t in self.terms:
            new[t.name], step = t.release(server[t.name], step, ctx)
        return new, step


def _own(ctx: ClientContext, term: Term) -> ClientContext:
    return replace(
        ctx,
        broadcast=ctx.broadcast.get(term.name, {}),
        client=ctx.client.get(term.name, {}),
    )


def chain(terms: Sequence[Term]) -> Chain:
    """Compose `terms`, left to right.

    Raises
    ------
    ValueError
        Two terms of one name, two that own the server step, a compressing term that is not last, or one
        that needs the Fisher information ahead of one that shifts the start.
    """
    names = [t.name for t in terms]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"each term may appear once, but {twice} appear more often in {names}")
    if len(owners := [t.name for t in terms if t.owns_step]) > 1:
        raise ValueError(f"only one term can own the server's step, but {owners} all do")
    if early := [t.name for t in terms[:-1] if t.compresses]:
        raise ValueError(f"a term that compresses the update comes last, but {early} do not")
    shifts = [i for i, t in enumerate(terms) if type(t).start is not Term.start]
    if early := [t.name for t in terms[: max(shifts, default=0)] if t.needs_fisher]:
        raise ValueError(
            f"{early} measure where local training ended: put them behind "
            f"'{terms[max(shifts)].name}', which shifts where it starts"
        )
    return Chain(tuple(terms))
