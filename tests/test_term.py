"""Terms and chains: derivatives against the penalties, composition rules, configs."""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from flwr_regs import FirstOrder, InProcessGrid, Proximal, RegClient, RegStrategy, StackedGrid
from flwr_regs.abilities import ABILITIES, Averages, Probes
from flwr_regs.term import Term
from flwr_regs.testing.problem import app_of, make_clients
from tests.conftest import Log, norm_model, run, start, still


def made(name: str, **attributes: Any) -> Term:
    return type("Made", (Term,), {"name": name, **attributes})()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([Proximal(1.0), Proximal(2.0)], "each term may appear once.*proximal"),
        ([made("needy", needs=("labels",))], "'needy' needs .'labels'., but a term can need"),
        ([type(n, (Term, Averages), {})() for n in "ab"], "only one term can choose the model"),
        ([made("keeper", keeps="never")], "'keeper' keeps 'never', expected one of"),
        *(([made(name)], "a term's name is part of keys") for name in ("", "regs", "a,b", "a.b")),
    ],
)
def test_terms_that_do_not_go_together_are_refused(terms: list[Term], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RegStrategy(terms)


def test_hyper_parameters_travel_by_name_and_a_missing_one_is_named() -> None:
    assert FirstOrder(0.3).config() == {"first-order.alpha": 0.3}
    for number in (np.float32(0.5), np.array(0.5), torch.tensor(0.5)):  # Flower sends no such
        assert type(FirstOrder(number).config()["first-order.alpha"]) is float
    assert FirstOrder.from_config({"first-order.alpha": 0.3, "x": 1}) == FirstOrder(0.3)
    assert FirstOrder().config() == {}  # None does not travel
    assert FirstOrder.from_config({"lr": 0.1}) == FirstOrder()
    with pytest.raises(KeyError, match=r"proximal\.mu"):
        Proximal.from_config({"lr": 0.1})


def test_a_class_that_cannot_work_is_refused_or_warned_of(log: Log) -> None:
    with pytest.raises(TypeError, match=r"defines fold\(\), but does not inherit Folds"):

        class Sums(Term):
            def fold(self, *args: Any) -> Any: ...

    with pytest.raises(TypeError, match=r"defines averaged\(\), but does not inherit Averages"):
        made("last", averaged=lambda self, model, step, server: model)

    with pytest.raises(TypeError, match=r"Bounded.ranges: 'mu' must have a Range, .*5\]'"):

        class Bounded(Term):
            ranges: ClassVar[Any] = {"mu": "[0, 5]"}

    assert type("Unnamed", (Term,), {}).name == "Unnamed"

    class Half(Term, Probes):
        def probe(self, ctx: Any) -> Any: ...

    with pytest.raises(TypeError, match="answer"):
        Half()  # type: ignore[abstract]

    class Forgets(Proximal):
        name: ClassVar[str] = "forgets"

        def __post_init__(self) -> None:
            assert self.mu != 7

    with pytest.raises(TypeError, match=r"Forgets.__post_init__ must call super\(\).__post_init__"):
        RegStrategy([Forgets(-1.0)])

    @dataclass(frozen=True)
    class Wide(Proximal):
        sizes: Any = (1, 2)

    with pytest.raises(TypeError, match="is a tuple: a term's fields travel"):
        RegStrategy([Wide(0.1)])

    with pytest.raises(TypeError, match=r"Made.correct must take \(self, grads, params, ctx\)"):
        RegStrategy([made("short", correct=lambda self, grads, ctx: grads)])

    for own in ({"start": 5}, {"head": 5}):
        with pytest.raises(TypeError, match=r"Made\..* is 5, but '.*' is a method of terms: give"):
            RegStrategy([made("late", **own)])

    class Typo(Term):
        name: ClassVar[str] = "typo"

        def corect(self, grads: Any, params: Any, ctx: Any) -> Any:
            return grads

    for _ in range(2):
        with pytest.raises(TypeError, match="nothing; did you mean 'correct' with 'corect'"):
            RegStrategy([Typo()])

    class Halves(Typo):
        """The other half of the method is there: `corect` may be its helper."""

        def loss(self, base: Any, params: Any, ctx: Any) -> Any:
            return base

        def _start(self) -> None: ...

    class Nothing(Term):
        name: ClassVar[str] = "nothing"

    for _ in range(2):
        RegStrategy([Halves(), Nothing(), type("Judged", (Term, Averages), {})()])
    first, second = log(level=logging.WARNING)
    assert "does not call (begin a helper's name with _); did you mean 'correct'" in first
    assert second == "the term Nothing has no hook and no ability, so it changes nothing"


@pytest.mark.parametrize(
    ("hook", "wrong", "said"),
    [
        ("finish", lambda delta, *_: delta, r"\(delta, upload, client slot\), not a dict"),
        ("finish", lambda delta, *_: (delta, {}), r"client slot\), not a tuple of 2"),
        ("update", lambda server, *_: server, r"\(server slot, delta\), not a dict"),
        ("release", lambda _, step, __: (step,), r"\(server slot, step\), not a tuple of 1"),
        ("release", lambda slot, *_: (slot, {}), r"step with an array for each of .*, not \[\]"),
        ("update", lambda slot, d, *_: (slot, {n: a[:1] for n, a in d.items()}), "'0.weight' of"),
        ("finish", lambda d, *_: ({n: a[:1] for n, a in d.items()}, {}, {}), "'0.weight' of"),
        ("start", lambda p, *_: {n: a[:1] for n, a in p.items()}, "parameters with '0.weight' of"),
        ("start", lambda *_: {}, r"parameters with an array for each of .*, not \[\]"),
        ("loss", lambda *_: None, "the loss, a scalar tensor, not a NoneType"),
        ("loss", lambda base, *_: base.expand(2), r"scalar tensor, not a Tensor of shape \(2,\)"),
        ("finish", lambda d, *_: (d, {}, {7: d["0.bias"]}), "arrays or numbers by name, not by 7"),
        ("finish", lambda d, *_: (d, {"a": "text"}, {}), "or numbers by name, not a str as 'a'"),
        ("broadcast", lambda *_: None, "arrays or numbers by name, not a NoneType"),
        ("correct", lambda g, *_: {n: np.ones(a.shape) for n, a in g.items()}, "as a tensor, not"),
        ("loss", lambda *_: np.ones(1), r"scalar tensor, not a ndarray of shape \(1,\)"),
        ("correct", lambda g, *_: {n: a[:1] for n, a in g.items()}, r"'0.weight' of shape"),
        ("correct", lambda g, *_: {n: a.mul_(2) for n, a in g.items()}, "new .* changes '0.we"),
        ("loss", lambda b, p, _: b + p["0.bias"].detach().mul_(2).sum(), "new .* changes '0.b"),
        ("evolve", lambda g, *_: [a.mul_(2) for a in g.values()] and {}, "new .* changes '0.we"),
        ("finish", lambda d, *_: (d.update({"0.bias": d["0.bias"] / 2}) or d, {}, {}), "changes"),
        ("start", lambda p, *_: {n: a.mul_(2) for n, a in p.items()}, "new arrays.* changes '0.we"),
        *((n, lambda *_: None, "not a NoneType") for n in ("evolve", "point", "optimizer_start")),
        *((n, lambda *_: None, "not a NoneType") for n in ("client_optimizer", "private")),
        *((n, lambda *_: None, "not a NoneType") for n in ("fold", "answer", "broadcast_to")),
        ("answer", lambda _: {77: {}}, r"a slot for each of \[0, 1, 2, 3\], not for \[77\]"),
    ],
)
def test_a_hook_that_returns_too_little_is_named(hook: str, wrong: Any, said: str) -> None:
    bases: Any = (Term, *(a for a in ABILITIES if hook in a.__abstractmethods__))
    first: Any = {"probe": lambda *_: ({}, {})} if Probes in bases else {}
    kind: Any = type("Mine", bases, {"name": "mine", **first, hook: staticmethod(wrong)})
    for grid in (InProcessGrid, StackedGrid):
        clients = grid(app_of(RegClient, make_clients(), terms=[kind]), 4)
        with pytest.raises(Exception, match=rf"Mine\.{hook} must return .*{said}"):
            start(RegStrategy([kind()]), clients, 1)


def test_terms_see_trainable_parameters_alone_from_init_on() -> None:
    """Though the server learns of buffers only from the first replies."""
    seen: dict[str, set[str]] = {}

    class Witness(Term):
        name: ClassVar[str] = "witness"

        def init(self, params: Any) -> Any:
            seen["init"] = set(params)
            return {}

        def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
            seen.update(delta=set(delta), params=set(ctx.params))
            return server, delta

    how: dict[str, Any] = {"rounds": 2, "model": lambda: still(norm_model(), "0"), "terms": []}
    run(RegStrategy([Witness()], seed=1), RegClient, **how)
    trained = {n for n, p in how["model"]().named_parameters() if p.requires_grad}
    assert seen == {"init": trained, "delta": trained, "params": trained}
