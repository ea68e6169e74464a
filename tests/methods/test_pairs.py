"""Every ordered pair of the package's terms: it composes, or is refused.

A pair that composes runs through Flower's messages and must give the model of plain loops written from
the papers' formulas (oracles/pairs.py).
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

import flwr_regs as fr
from flwr_regs.abilities import Steps
from flwr_regs.chain import chain
from flwr_regs.term import ServerContext, Term
from tests.conftest import close, make_clients, make_model, run, to_numpy
from tests.laws import server_sgd
from tests.oracles.pairs import composed
from tests.sampling import sampled

TERMS: list[Term] = [  # none at a neutral point: each changes the model within three rounds
    fr.SelfDistillation(0.4, 2.0),
    fr.FeatureTable(0.5),
    fr.LeaveOneOutMean(0.5),
    fr.Proximal(0.7),
    fr.FirstOrder(0.6),
    fr.EmbeddedMomentum(0.5, 0.7, 0.9),
    fr.SlowMomentum(0.6, 0.9),
    fr.TorchServerOptimizer(server_sgd),
    fr.AdaptiveServer("adam", 0.02, 0.8, 0.95, 0.01),
    fr.Elastic(0.5),
    fr.Curvature(0.5),
    fr.LocalBatchNorm(),
    fr.Private("0.weight"),
    fr.SparseTernary(0.3, 0.4),
]
Pair = tuple[Term, Term]
PAIRS: list[Pair] = list(itertools.permutations(TERMS, 2))

# What is refused: any of these on the left, any of those on the right, the sentence. The rest composes.
OWNERS = {fr.EmbeddedMomentum, fr.SlowMomentum, fr.TorchServerOptimizer, fr.AdaptiveServer}
FEATURES = {fr.FeatureTable, fr.LeaveOneOutMean}
FISHER = {fr.Elastic, fr.Curvature}
REFUSED: list[tuple[set[Any], set[Any], str]] = [
    (OWNERS, OWNERS, r"only one term can own the server's step, but '.*' and '.*' do: keep"),
    (FEATURES, FEATURES, "'rfedavg' and .*'rfedavg-plus'.* would count twice: keep one"),
    (FISHER, FISHER, "'fedcurv' and .*'elastic'.* would count twice: keep one"),
    ({fr.SparseTernary}, {type(t) for t in TERMS}, "compresses comes last: move 'ternary'"),
    # they look at v_k, and only FedADC's `finish` makes v_k of where its shifted steps ended
    ({*FISHER, fr.FeatureTable}, {fr.EmbeddedMomentum}, "update before 'fedadc'.*put them behind"),
]


def refusal(pair: Pair) -> str | None:
    a, b = (type(t) for t in pair)
    return next((why for left, right, why in REFUSED if a in left and b in right), None)


def has(kind: type[Term], hook: str) -> bool:
    return getattr(kind, hook, None) is not getattr(Term, hook, None)


def of_pairs(pairs: Sequence[Pair]) -> pytest.MarkDecorator:
    """Each term on the left and on the right of some other; ``-m full`` has every pair."""
    return sampled("pair", pairs, 4, lambda t: t.name)


COMPOSING = [p for p in PAIRS if not refusal(p)]


def trained(terms: tuple[Term, ...], batch_norm: bool = False) -> dict[str, np.ndarray]:
    """Three rounds of three unequal clients, a learning rate that falls; the model at the end."""
    settings: dict[str, Any] = {"lr_schedule": lambda t: 0.8 ** (t - 1), "fraction_evaluate": 0.0}
    strategy = fr.RegStrategy(terms, seed=3, **settings)
    how: dict[str, Any] = {"rounds": 3, "clients": make_clients(3), "train": {"local-epochs": 1}}
    kinds = [type(t) for t in terms if not t.server_only]
    model = partial(make_model, batch_norm=batch_norm)
    got = run(strategy, fr.RegClient, model=model, terms=kinds, **how)
    assert [e["failures"] for e in strategy.history] == [{}, {}, {}]
    assert all(np.isfinite(a).all() for a in got.values())
    return got


def by_formula(terms: Sequence[Term]) -> dict[str, np.ndarray]:
    """The same by plain loops."""
    settings = {t.name: dict(vars(t)) for t in terms if not isinstance(t, fr.Private)}
    if "server-optimizer" in settings:
        settings["server-optimizer"] = {"lr": 0.7, "momentum": 0.6}  # server_sgd's
    return composed(
        {k: v.numpy().copy() for k, v in make_model().state_dict().items()},
        to_numpy(make_clients(3)),
        3,
        lambda t: 0.2 * 0.8 ** (t - 1),
        terms=settings,
        private=tuple(t.patterns for t in terms if isinstance(t, fr.Private)),
    )


@pytest.mark.parametrize("left", TERMS, ids=lambda t: t.name)
def test_a_pair_composes_or_is_refused_with_a_sentence(left: Term) -> None:
    """Every pair: this costs next to nothing."""
    for pair in (p for p in PAIRS if p[0] is left):
        if why := refusal(pair):
            with pytest.raises(ValueError, match=why):
                fr.RegStrategy(pair)
        else:
            assert fr.RegStrategy(pair).term.terms == pair


@of_pairs([p for p in COMPOSING if not any(isinstance(t, fr.LocalBatchNorm) for t in p)])
def test_a_pair_is_what_the_formulas_say(pair: Pair) -> None:
    close(trained(pair), by_formula(pair), 1e-10)


@of_pairs([p for p in COMPOSING if any(isinstance(t, fr.LocalBatchNorm) for t in p)])
def test_local_batch_norm_is_private_entries_by_another_name(pair: Pair) -> None:
    """So that what the formulas say of these holds for it; they know no BatchNorm."""
    if any(isinstance(t, fr.Private) for t in pair):
        named = (fr.Private("0.weight,1.*"),)
    else:
        named = tuple(fr.Private("1.*") if isinstance(t, fr.LocalBatchNorm) else t for t in pair)
    close(trained(pair, True), trained(named, True), 0.0)


# What chain() goes by


def on_the_server() -> tuple[Any, Any, ServerContext]:
    """Parameters, an averaged update with entries of both signs, and the context of round 1."""
    params = {n: p.detach().numpy() for n, p in make_model().named_parameters()}
    rng = np.random.default_rng(5)
    delta = {n: 0.1 * rng.standard_normal(p.shape) for n, p in params.items()}
    return params, delta, ServerContext(1, 0.1, params)


@pytest.mark.parametrize("term", [*TERMS, fr.PastModels()], ids=lambda t: t.name)
def test_a_term_keeps_delta_if_it_says_so(term: Term) -> None:
    """And says so if it does, unless it owns the step: else it would be refused without need."""
    if isinstance(term, fr.LocalBatchNorm | fr.Private):
        assert not has(type(term), "update")
        return
    params, delta, ctx = on_the_server()
    uploads: dict[int, Any] = {0: {"delta": np.ones(6)}} if term.name == "rfedavg" else {}
    _, step = term.update(term.init(params), delta, uploads, ctx)
    kept = all(np.array_equal(step[n], delta[n]) for n in delta)
    assert kept == (term.keeps_delta or not has(type(term), "update"))
    assert kept != isinstance(term, Steps)


class Halve(Term):
    """Halves the step: of no paper, but a term that someone may write."""

    name: ClassVar[str] = "halve"

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return server, {n: d / 2 for n, d in delta.items()}


@pytest.mark.parametrize("owner", [t for t in TERMS if isinstance(t, Steps)], ids=lambda t: t.name)
def test_no_one_alters_the_step_after_its_owner_made_it(owner: Term) -> None:
    with pytest.raises(ValueError, match=rf"alter the step after '{owner.name}'.*put them behind"):
        chain([fr.Proximal(1.0), Halve(), owner])
    term = chain([owner, Halve()])
    params, delta, ctx = on_the_server()
    _, got = term.update(term.init(params), delta, {}, ctx)
    halves = {n: d / 2 for n, d in delta.items()}
    close(got, owner.update(owner.init(params), halves, {}, ctx)[1], 0.0)


def test_a_chain_among_terms_counts_as_its_own_terms() -> None:
    """Its flags would else be those of no term: no owner, no features."""
    inner = chain([fr.Proximal(1.0), fr.SlowMomentum(0.5)])
    assert chain([fr.FirstOrder(1.0), inner]) == chain([fr.FirstOrder(1.0), *inner.terms])
    with pytest.raises(ValueError, match="only one term can own"):
        chain([inner, fr.EmbeddedMomentum(0.5, 0.5)])
