"""Several terms as one; and the terms that a user gives: instances to a strategy, classes to a client."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mode
from typing import Any, ClassVar

import flwr_regs.abilities as abilities
from flwr_regs.hook_checks import (
    check_hooks,
    check_like,
    checked_slot,
    checked_step,
    mapping,
    several,
    several_names,
    unchanged,
)
from flwr_regs.term import Arrays, ClientContext, ServerContext, Slot, Term, changed, overrides

NEEDS = ("features", "start_output", "label_counts")
OUTPUT_OF = "output of "  # a layer's name follows
KEEPS = ("if-used", "always")
ONLY_ONE: dict[tuple[type, ...], str] = {
    (abilities.Steps,): "own the server's step",
    (abilities.Weighs,): "weigh the clients' updates",
    (abilities.Averages,): "choose the model that is judged",
    (abilities.Personalises, abilities.FineTunes): "give the clients models of their own",
}


@dataclass(frozen=True)
class Chain(Term, composes=True):
    """Several terms as one; each slot maps a term's name to that term's slot.

    Losses, corrections, `finish`, `release` and personal models run left to right, server updates right to
    left. An ability of the chain is that of its terms; a term without it is passed over.
    """

    name: ClassVar[str] = "chain"
    terms: tuple[Term, ...] = ()

    def config(self) -> dict[str, Any]:
        return {key: value for t in self.terms for key, value in t.config().items()}

    def able(self, *kinds: type) -> list[Any]:
        """Return the terms that have one of these abilities."""
        return [t for t in self.terms if isinstance(t, kinds)]

    def overriding(self, hook: str) -> list[Any]:
        """Return the terms whose class has its own hook, or ability's method: the others cost nothing."""
        return [t for t in self.terms if overrides(type(t), hook)]

    def _in_turn(self, hook: str, params: Arrays, ctx: ClientContext) -> Arrays:
        for t in self.overriding(hook):
            with unchanged(t, hook, params):
                made = getattr(t, hook)(params, own_context(ctx, t))
            check_like(made, params, t, hook, "dict of parameters")
            params = made
        return params

    # on a client

    def start(self, params: Arrays, ctx: ClientContext) -> Arrays:
        return self._in_turn("start", params, ctx)

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        for t in self.overriding("loss"):
            with unchanged(t, "loss", params):
                base = t.loss(base, params, own_context(ctx, t))
            shape = getattr(base, "shape", None)
            if shape is None or math.prod(shape) != 1 or not hasattr(base, "detach"):
                must = f"{type(t).__name__}.loss must return the loss, a scalar tensor"
                of_shape = "" if shape is None else f" of shape {tuple(shape)}"
                raise TypeError(f"{must}, not a {type(base).__name__}{of_shape}")
        return base

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        left: tuple[Term, ...] = ()
        for t in self.overriding("correct"):
            more = {"gradient_at": gradient_after(left, ctx)} if left else {}
            with unchanged(t, "correct", grads, params):
                made = t.correct(grads, params, own_context(ctx, t, **more))
            check_like(made, grads, t, "correct", "gradient")
            grads, left = made, (*left, t)
        return grads

    def evolve(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Slot:
        slots: Slot = {}
        for i, t in enumerate(self.terms):
            if isinstance(t, abilities.Evolves):
                left = self.terms[:i]
                given = Chain(left).correct(grads, params, ctx)
                own = own_context(ctx, t, gradient_at=gradient_after(left, ctx))
                with unchanged(t, "evolve", given, params):
                    made = t.evolve(given, params, own)
                slots[t.name] = checked_slot(made, t, "evolve")
        return slots

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        upload: Slot = {}
        client: Slot = {}
        given = delta
        for i, t in enumerate(self.terms):
            later = any(r.acts("finish") and not r.keeps_update for r in self.terms[i + 1 :])
            with unchanged(t, "finish", delta):
                made = t.finish(delta, own_context(ctx, t, delta_is_sent=not later))
            names = ("delta", "upload", "client slot")
            delta, upload[t.name], client[t.name] = several(made, t, "finish", names)
            check_like(delta, given, t, "finish", "delta")
            for slot in (upload[t.name], client[t.name]):
                checked_slot(slot, t, "finish")
        return delta, upload, client

    def probe(self, ctx: ClientContext) -> tuple[Slot, Slot]:
        made = ((t, t.probe(own_context(ctx, t))) for t in self.overriding("probe"))
        pairs = {t.name: several(of, t, "probe", ("upload", "client slot")) for t, of in made}
        return {n: u for n, (u, _) in pairs.items()}, {n: c for n, (_, c) in pairs.items()}

    def personal(self, params: Arrays, ctx: ClientContext) -> Arrays:
        return self._in_turn("personal", params, ctx)

    @property
    def personalising(self) -> list[str]:
        """The terms that give each client a model of its own."""
        return [t.name for t in self.able(abilities.Personalises, abilities.FineTunes)]

    def client_optimizer(self, make: Any) -> Any:
        checked: list[abilities.Steers] = []
        for t in self.overriding("client_optimizer"):
            before, make = make, t.client_optimizer(make)
            if not callable(make):
                must = f"{type(t).__name__}.client_optimizer must return a function"
                raise TypeError(f"{must} that makes an optimiser, not a {type(make).__name__}")
            checked += [t] if make is before else []
        for look in checked:  # a term that changed nothing sees what those on its right made
            look.client_optimizer(make)
        return make

    def optimizer_start(self, ctx: ClientContext) -> Arrays:
        state: Arrays = {}
        for t in self.overriding("optimizer_start"):
            state |= mapping(t.optimizer_start(own_context(ctx, t)), t, "optimizer_start")
        return state

    def point(self, params: Arrays, ctx: ClientContext) -> Arrays:
        given = params
        for t in self.overriding("point"):
            with unchanged(t, "point", params):
                made = mapping(t.point(params, own_context(ctx, t)), t, "point")
            params = made if made is params else {**params, **made}
            check_like(params, given, t, "point", "dict of parameters")
        return params

    def restrict(self, config: Mapping[str, Any]) -> None:
        for t in self.overriding("restrict"):
            t.restrict(config)

    def recover(self, step: Arrays, lr: float) -> Slot:
        terms = self.overriding("recover")
        return {t.name: checked_slot(t.recover(step, lr), t, "recover") for t in terms}

    # on both sides

    def private(self, names: Collection[str]) -> set[str]:
        return self._names("private", names)

    def frozen(self, names: Collection[str]) -> set[str]:
        frozen = self._names("frozen", names)
        if unknown := sorted(frozen - set(names)):
            raise ValueError(f"frozen: the model has no {unknown}, only {sorted(names)}")
        return frozen

    def _names(self, method: str, names: Collection[str]) -> set[str]:
        """Return what the terms choose of the model's names."""
        chosen = ((t, getattr(t, method)(names)) for t in self.overriding(method))
        return set[str]().union(*(several_names(made, t, method) for t, made in chosen))

    def coder(self, hook: str) -> abilities.Compresses | None:
        """Return the term in whose code the update of `hook` ("finish" or "release") travels."""
        return next((t for t in self.able(abilities.Compresses) if t.acts(hook)), None)

    @property
    def uploading(self) -> list[str]:
        """The terms that get more of a client than the mean; clipping and noise do not cover that."""
        return [
            t.name
            for t in self.terms
            if isinstance(t, abilities.Probes)
            or (isinstance(t, abilities.Checks) and t.acts("finish"))
            or t.acts("fold")
        ]

    @property
    def unaggregated(self) -> list[str]:
        """The terms whose uploads a robust aggregator does not reach."""
        return [t.name for t in self.terms if t.name in self.uploading and not self.aggregates(t)]

    @staticmethod
    def aggregates(term: Term) -> bool:
        """Whether all that the server makes of a term's uploads goes through the aggregator."""
        adds = isinstance(term, abilities.Folds) and type(term).adds is not abilities.Folds.adds
        return term.robust or (adds and not isinstance(term, abilities.Probes))

    # on the server

    def init(self, params: Arrays) -> Slot:
        return {t.name: t.init(params) for t in self.terms}

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        made = ((t, t.broadcast(server[t.name], ctx)) for t in self.terms)
        return {t.name: checked_slot(slot, t, "broadcast") for t, slot in made}

    def broadcast_to(self, pid: int, server: Slot, ctx: ServerContext) -> Slot:
        terms = self.overriding("broadcast_to")
        made = ((t, t.broadcast_to(pid, server[t.name], ctx)) for t in terms)
        return {t.name: checked_slot(slot, t, "broadcast_to") for t, slot in made}

    def answer(self, probes: Mapping[int, Slot], ctx: ServerContext) -> dict[int, Slot]:
        out: dict[int, Slot] = {pid: {} for pid in probes}
        for t in self.overriding("answer"):
            answers = mapping(t.answer_in(_uploads_of(t, probes), ctx), t, "answer")
            if strange := sorted(answers.keys() - out.keys()):
                must = f"{type(t).__name__}.answer must return a slot for each of {[*out]}"
                raise ValueError(f"{must}, not for {strange}")
            for pid, slot in answers.items():
                out[pid][t.name] = checked_slot(slot, t, "answer")
        return out

    def check(self, upload: Slot, params: Arrays, server: Slot, probing: bool = False) -> None:
        """Check the uploads of one client's probe or (not `probing`) reply; errors name the term."""
        sending = {t.name: t for t in self._sending(probing)}
        if unknown := sorted(set(upload) - set(sending)):
            raise ValueError(f"uploads of {unknown}, expected {sorted(sending)} at most")
        for name, t in sending.items():
            if isinstance(t, abilities.Checks):
                try:
                    t.check(upload.get(name, {}), params, server.get(name, {}))
                except Exception as error:  # whatever an upload makes a term raise
                    why = f"upload of '{name}': {error or type(error).__name__}"
                    raise ValueError(why) from error

    def agree(self, uploads: Mapping[int, Slot], probing: bool = False) -> dict[int, str]:
        """Return why, by partition id, for probes or replies whose uploads do not fit the others'."""
        wrong: dict[int, str] = {}
        for t in self._sending(probing):
            agrees = isinstance(t, abilities.Agrees)
            if agrees or not isinstance(t, abilities.Checks):
                sent = _uploads_of(t, uploads)
                odd = mapping(t.agree(sent), t, "agree") if agrees else _unlike_most(sent)
                wrong |= {p: f"upload of '{t.name}': {y}" for p, y in odd.items() if p in uploads}
        return wrong

    def _sending(self, probing: bool) -> list[Any]:
        """Return the terms with uploads in this exchange: of their probes, or else of `finish`."""
        return self.overriding("probe") if probing else [t for t in self.terms if t.acts("finish")]

    @property
    def plain(self) -> bool:
        """Whether only the server runs terms: clients train as in FedAvg, and may be any of Flower's."""
        return all(t.server_only for t in self.terms)

    @property
    def weigher(self) -> abilities.Weighs | None:
        """The term that sets the weights, if any."""
        return next(iter(self.able(abilities.Weighs)), None)

    def fold(
        self, acc: Slot, pid: int, delta: Arrays, upload: Slot, weight: float, ctx: ServerContext
    ) -> Slot:
        for t in self.overriding("fold"):
            sent = dict(upload.get(t.name, {}))  # read here, one client's at a time
            made = t.fold(acc.get(t.name, {}), pid, delta, sent, weight, ctx)
            acc[t.name] = mapping(made, t, "fold")
        return acc

    def update(
        self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext, folded: Any = None
    ) -> tuple[Slot, Arrays]:
        new: Slot = {}
        for t in reversed(self.terms):
            folds = isinstance(t, abilities.Folds)
            sent = (folded or {}).get(t.name, {}) if folds else _uploads_of(t, uploads)
            context = replace(ctx, answers=_uploads_of(t, ctx.answers)) if ctx.answers else ctx
            made = t.update(server[t.name], delta, sent, context)
            new[t.name], delta = checked_step(made, t, "update", delta)
        return new, delta

    def release(self, server: Slot, step: Arrays, ctx: ServerContext) -> tuple[Slot, Arrays]:
        new: Slot = {}
        for t in self.terms:
            made = t.release(server[t.name], step, ctx)
            new[t.name], step = checked_step(made, t, "release", step)
        return new, step


def name_of(terms: Iterable[Term | type[Term]]) -> str:
    """Return the name of a method for both sides: the terms that clients run, joined by ``+``.

    Without such a term the clients run FedAvg's plain training, so that is its name.
    """
    return "+".join(t.name for t in terms if not t.server_only) or "FedAvg"


def layers_of(terms: Iterable[Term]) -> list[str]:
    """Return the names of the layers whose outputs the terms need."""
    needs = {n for t in terms for n in t.needs if n.startswith(OUTPUT_OF)}
    return sorted(n.removeprefix(OUTPUT_OF) for n in needs)


def own_context(ctx: ClientContext, term: Term, **more: Any) -> ClientContext:
    """Return the context of a chain with one term's own slots, and `more` fields."""
    slots = ctx.broadcast.get(term.name, {}), ctx.client.get(term.name, {})
    return changed(ctx, broadcast=slots[0], client=slots[1], **more)


def gradient_after(left: tuple[Term, ...], ctx: ClientContext) -> Callable[[Arrays], Arrays]:
    """Return `gradient_at` of a term that has the terms `left` on its left."""
    return lambda params: Chain(left).correct(ctx.gradient_at(params), params, ctx)


def _unlike_most(uploads: Mapping[int, Slot]) -> dict[int, str]:
    """Return why, for uploads with an array of another shape or dtype than most have under its key."""
    kinds = {
        pid: {key: (tuple(a.shape), str(a.dtype)) for key, a in upload.items()}
        for pid, upload in sorted(uploads.items())
    }
    by_key: dict[str, list[Any]] = {}
    for key, kind in (pair for of_one in kinds.values() for pair in of_one.items()):
        by_key.setdefault(key, []).append(kind)
    usual = {key: mode(of_key) for key, of_key in by_key.items()}
    return {
        pid: f"'{key}' is {kind}, but most clients' {usual[key]}"
        for pid, of_one in kinds.items()
        for key, kind in of_one.items()
        if kind != usual[key]
    }


def _uploads_of(term: Term, uploads: Mapping[int, Slot]) -> dict[int, Slot]:
    """Return a term's own part of the uploads, or of what went down, by partition id."""
    return {pid: upload.get(term.name, {}) for pid, upload in uploads.items()}


def chain(terms: Sequence[Term]) -> Chain:
    """Compose `terms`, left to right; a chain among them is replaced by its terms.

    Raises
    ------
    ValueError
        The terms cannot be combined, or not in this order; docs/architecture.md lists the rules.
    TypeError
        No list of terms, or a term that is not an instance of Term.
    """
    given = check_instances(terms, "chain")
    terms = [u for t in given for u in (t.terms if isinstance(t, Chain) else (t,))]
    names = [t.name for t in terms]
    if odd := [n for n in names if n in ("", "regs") or set(n) & set(",+.")]:
        raise ValueError(
            f"a term's name is part of keys: it must not be {odd[0]!r} (empty, 'regs', or with one of ,+.)"
        )
    if twice := sorted({n for n in names if names.count(n) > 1}):
        what = f"each term may appear once, but {_listed(twice)} appears more often"
        raise ValueError(f"{what}: keep one")
    for t in terms:
        check_hooks(t)
        needs = [n for n in t.needs if not n.startswith(OUTPUT_OF)]
        if strange := sorted({*needs} - {*NEEDS}):
            possible = [*NEEDS, f"{OUTPUT_OF}<layer>"]
            raise ValueError(f"'{t.name}' needs {strange}, but a term can need {possible}")
        if "_checked" not in vars(t):
            raise TypeError(
                f"{type(t).__name__}.__post_init__ must call super().__post_init__(), which checks settings"
            )
        for key, value in t.config().items():
            if not isinstance(value, int | float | str):
                fields = "fields travel, so they are numbers, text, true or false"
                raise TypeError(f"'{key}' is a {type(value).__name__}: a term's {fields}")
        if t.keeps not in KEEPS:
            raise ValueError(f"'{t.name}' keeps {t.keeps!r}, expected one of {KEEPS}")
        if others := sorted(set(t.excludes) & set(names)):
            if isinstance(t.excludes, Mapping):
                raise ValueError(f"'{t.name}' excludes '{others[0]}': {t.excludes[others[0]]}")
            raise ValueError(
                f"{_listed([t.name, *others])} are versions of one term and together would count twice: "
                "keep one"
            )
    for kinds, what in ONLY_ONE.items():
        if len(several := [t.name for t in terms if isinstance(t, kinds)]) > 1:
            raise ValueError(f"only one term can {what}, but {_listed(several)} do: keep one")
    counting = [t.name for t in terms if isinstance(t, abilities.CountsOnMean)]
    if counting and (weighing := [t.name for t in terms if isinstance(t, abilities.Weighs)]):
        raise ValueError(
            f"{_listed(weighing)} weighs the updates anew, but {_listed(counting)} counts on their mean: "
            "leave one of the two out"
        )
    owners = [t.name for t in terms if isinstance(t, abilities.Steps)]
    ahead = terms[: names.index(owners[0])] if owners else []
    if late := [t.name for t in ahead if t.acts("update") and not t.keeps_delta]:
        raise ValueError(
            f"updates run right to left, so {_listed(late)} would alter the step after '{owners[0]}' has "
            f"made it: put them behind '{owners[0]}', or set keeps_delta if they return delta unchanged"
        )
    if early := [t.name for t in terms[:-1] if isinstance(t, abilities.Compresses)]:
        raise ValueError(f"a term that compresses comes last: move {_listed(early)} to the end")
    last = max((i for i, t in enumerate(terms) if t.acts("start")), default=0)
    ahead = [t for t in terms[:last] if not t.acts("start")]
    if early := [t.name for t in ahead if t.acts("finish")]:
        raise ValueError(
            f"{_listed(early)} would see a client's update before '{names[last]}' has undone its shift of "
            f"the starting point: put them behind '{names[last]}'"
        )
    return Chain(tuple(terms))


def _listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them."""
    return " and ".join(map(repr, names))


def check_instances(terms: Any, who: str) -> Sequence[Term]:
    """Return the terms of a strategy of class `who`; TypeError unless they are a list of instances."""
    for term in _list(terms, who, f"terms, such as {who}([Proximal(0.1)])"):
        if not isinstance(term, Term):
            hint = " (a client's are classes)" if _is_term_class(term) else ""
            if inner_terms := getattr(getattr(term, "term", None), "terms", ()):
                hint = f"; give its terms, {list(inner_terms)}"
            given = f"{named(term)}{hint}"
            raise TypeError(f"{who}'s terms are instances, such as Proximal(0.1), not {given}")
    return list(terms)


def check_classes(terms: Any, who: str) -> tuple[type[Term], ...]:
    """Return the terms of a client of class `who`; TypeError unless they are a list of classes."""
    for term in _list(terms, who, "classes of terms, such as [Proximal]"):
        if not _is_term_class(term):
            hint = "; its hyper-parameters come from the strategy" * isinstance(term, Term)
            raise TypeError(f"{who} takes classes, such as Proximal, not {named(term)}{hint}")
    return tuple(terms)


def _list(terms: Any, who: str, expected: str) -> Sequence[Any]:
    if not isinstance(terms, Sequence) or isinstance(terms, str):
        raise TypeError(f"{who} takes a list of {expected}, not {named(terms)}")
    return terms


def _is_term_class(term: Any) -> bool:
    return isinstance(term, type) and issubclass(term, Term)


def named(given: Any) -> str:
    """Return what was given, as a message calls it."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if isinstance(getattr(given, "term", None), Term):
        return f"the strategy {type(given).__name__}"
    return f"the term {given!r}" if isinstance(given, Term) else repr(given)
