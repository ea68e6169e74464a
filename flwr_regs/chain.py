"""Several terms as one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flwr_regs.term import Arrays, ClientContext, ServerContext, Slot, Term


@dataclass(frozen=True)
class Chain(Term):
    """Several terms as one; each slot maps a term's name to that term's slot.

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
        """Check the uploads of the terms that probe (`probing`) or of the others; errors name the term."""
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
    """Compose `terms`, left to right; a chain among them is replaced by its terms.

    Raises
    ------
    ValueError
        The terms cannot be combined, or not in this order; docs/architecture.md lists the rules.
    TypeError
        One of them is not a term, for example a term's class.
    """
    terms = [u for t in terms for u in (t.terms if isinstance(t, Chain) else (t,))]
    if wrong := [t for t in terms if not isinstance(t, Term)]:
        raise TypeError(
            "a strategy's terms are instances, such as [Proximal(0.1), LocalBatchNorm()], but "
            f"{wrong[0]!r} is none (a client's are classes)"
        )
    names = [t.name for t in terms]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"each term may appear once, but {twice} appear more often in {names}")
    for t in terms:
        if others := sorted(set(t.excludes) & set(names)):
            raise ValueError(
                f"'{t.name}' and {others} are versions of one term and together would count twice: "
                "keep one"
            )
    if len(owners := [t.name for t in terms if t.owns_step]) > 1:
        raise ValueError(f"only one term can own the server's step, but {owners} all do: keep one")
    ahead = terms[: names.index(owners[0])] if owners else []
    if late := [t.name for t in ahead if _overrides(t, "update") and not t.keeps_delta]:
        raise ValueError(
            f"updates run right to left, so {late} would alter the step after '{owners[0]}' has made "
            f"it: put them behind '{owners[0]}', or set keeps_delta if they return delta unchanged"
        )
    if early := [t.name for t in terms[:-1] if t.compresses]:
        raise ValueError(
            f"a term that compresses the update comes last, but {early} do not: move them to the end"
        )
    shifts = [i for i, t in enumerate(terms) if _overrides(t, "start")]
    ahead = [t for t in terms[: max(shifts, default=0)] if not _overrides(t, "start")]
    if early := [t.name for t in ahead if _overrides(t, "finish")]:
        raise ValueError(
            f"{early} finish with a client's update before '{terms[max(shifts)].name}' has undone its "
            f"shift of the starting point: put them behind '{terms[max(shifts)].name}'"
        )
    return Chain(tuple(terms))


def _overrides(term: Term, hook: str) -> bool:
    return getattr(type(term), hook) is not getattr(Term, hook)
