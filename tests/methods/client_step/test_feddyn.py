"""FedDyn beyond the laws: h and h_k, what is refused, where it settles, and other terms beside it."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import flwr_regs as fr
from flwr_regs.term import ServerContext
from flwr_regs.testing.problem import start_weights, train
from tests.conftest import budgeted, close, make_clients, make_model, to_numpy
from tests.methods.watching import (
    CURVATURES,
    LOST,
    SHORT,
    SOME,
    Forgetful,
    Watched,
    between,
    composed,
    settles,
    watched,
)
from tests.oracles.client_step.feddyn import feddyn
from tests.oracles.model import Params
from tests.sampling import sampled

SINGLE = {"clients": make_clients(4, torch.float32), "model": partial(make_model, torch.float32)}


def expected(found: Watched, controls: Any, **more: Any) -> list[Params]:
    """The oracle's models for the cohorts and replies of a run; `controls` takes h and h_k."""
    return feddyn(
        start_weights(), to_numpy(make_clients(5)), 8, lambda t: 0.2, 2, alpha=0.3,
        controls=controls, **found.plan, **more,
    )  # fmt: skip


CELLS = list(product(["model", "delta"], ["average", "drop"], ["uniform", "num-examples"]))


@sampled("downlink,incomplete,weighting", CELLS, 5)
def test_some_clients_of_which_some_stop_early(
    downlink: str, incomplete: str, weighting: str
) -> None:
    """3 of 5 clients a round. Models, h and each h_k are the oracle's, and Σ h_k / N is h."""
    strategy = fr.FedDyn(0.3, downlink=downlink, incomplete=incomplete, weighting=weighting, **SOME)
    found = watched(strategy, budgeted(fr.FedDynClient, SHORT), "feddyn")
    assert any(found.plan["unused"]) == (incomplete == "drop")
    controls: list[tuple[Params, list[Params]]] = []
    short = [SHORT[t % 4] for t in range(8)]
    models = expected(found, controls, steps_done=short, weighting=weighting)
    last = {k: {n: np.zeros_like(a) for n, a in start_weights().items()} for k in range(5)}
    for t, (h, own) in enumerate(controls):
        close(found.models[t], models[t], 1e-10)
        close(found.server[t], h, 1e-10)
        last |= {k: found.kept[t + 1, k] for k in found.history[t]["replies"]}
        for k, mine in last.items():
            close(mine, own[k], 1e-10)
        close(found.server[t], {n: sum(a[n] for a in last.values()) / 5 for n in h}, 1e-12)


def test_a_client_that_lost_its_term_is_named() -> None:
    """It begins at 0, and its old share stays in h."""
    strategy = fr.FedDyn(0.3, seed=3, fraction_evaluate=0.0)
    found = watched(strategy, fr.FedDynClient, "feddyn", Forgetful)
    assert [set(e["lost_state"]) for e in found.history] == LOST
    controls: list[tuple[Params, list[Params]]] = []
    close(found.models[-1], expected(found, controls, lost=LOST)[-1], 1e-10)
    close(found.server[-1], controls[-1][0], 1e-10)
    mean = sum(found.kept[8, k]["0.weight"] for k in range(5)) / 5
    assert abs(found.server[-1]["0.weight"] - mean).max() > 1e-4


def test_compression_leaves_out_what_the_clients_have_yet_to_send() -> None:
    """h = mean(h_k + α R_k), R_k the residual of client k."""
    terms = [fr.DynamicRegulariser(0.3), fr.SparseTernary(0.3)]
    strategy = fr.RegStrategy(terms, seed=3, fraction_evaluate=0.0)
    found = watched(strategy, composed(*terms), "feddyn", rounds=4, beside="ternary", **SINGLE)
    for n, h in found.server[-1].items():
        own = [found.kept[4, k][n] + 0.3 * found.beside[4, k][n] for k in range(4)]
        np.testing.assert_allclose(h, sum(own) / 4, rtol=0, atol=1e-6)
        assert max(abs(found.beside[4, k][n]).max() for k in range(4)) > 1e-3


# where it settles

EXACT = between([a / 2 for a in CURVATURES])


@pytest.mark.parametrize("alpha", [5.0, 7.0])
def test_the_explicit_step_has_a_limit(alpha: float) -> None:
    """η (a + α) < 2, for the larger curvature, a = 4: with η = 0.2, α < 6."""
    strategy = fr.FedDyn(alpha, seed=3, fraction_evaluate=0.0)
    try:
        found = settles(strategy, fr.FedDynClient, rounds=20, lr=0.2)
    except fr.RoundFailed:  # it diverged
        found = np.inf
    if alpha < 6:
        assert found == pytest.approx(EXACT, abs=1e-2)
    else:
        assert abs(found) > 1e3


# what is refused, and what composes


@pytest.mark.parametrize("alpha", [0, -0.1, float("nan")])
def test_alpha_must_be_positive(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha must be a positive number"):
        fr.FedDyn(alpha)


def test_what_does_not_go_with_it() -> None:
    dyn = fr.DynamicRegulariser(0.1)
    with pytest.raises(ValueError, match="only one term can own the server's step"):
        fr.RegStrategy([dyn, fr.SlowMomentum(0.5)])
    with pytest.raises(ValueError, match=r"'feddyn' excludes 'scaffold': .*same drift.*keep one"):
        fr.RegStrategy([fr.ControlVariates(), dyn])
    assert fr.FedDyn(0.1).weighting == "uniform"


def test_batch_norm_that_stays_with_the_clients_has_no_h() -> None:
    terms = [fr.LocalBatchNorm(), fr.DynamicRegulariser(0.3)]
    strategy = fr.RegStrategy(terms, seed=3, fraction_evaluate=0.0)
    train(strategy, composed(*terms), rounds=2, model=partial(make_model, batch_norm=True))
    h = strategy.training.model.server["feddyn"]
    assert set(h) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    # a bias in front of BatchNorm has no gradient
    assert min(abs(a).max() for n, a in h.items() if n != "0.bias") > 1e-4


def test_buffers_are_averaged_and_get_no_step() -> None:
    """Round 1 is FedProx's on the clients. The model moves by twice the mean: −h/α is the second half."""
    model = partial(make_model, batch_norm=True)
    found = train(fr.FedDyn(0.3, seed=3), fr.FedDynClient, rounds=1, model=model)[0]
    strategy = fr.FedProx(0.3, seed=3, weighting="uniform")
    same = train(strategy, fr.FedProxClient, rounds=1, model=model)[0]
    for n in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        np.testing.assert_allclose(found[n], same[n], rtol=0, atol=1e-12)
    start = {n: v.numpy() for n, v in model().state_dict().items()}
    for n in ("0.weight", "1.weight"):
        moved = same[n] - start[n]
        np.testing.assert_allclose(found[n] - start[n], 2 * moved, rtol=0, atol=1e-12)


def test_a_robust_sum_counts_the_clients_whose_state_counts() -> None:
    """Krum gives n times the mean of those that it selected."""
    term, one = fr.DynamicRegulariser(0.5), np.ones(2)
    ctx = ServerContext(
        1, 0.1, {"w": np.zeros(2)}, population=8, weights=dict.fromkeys(range(4), 0.25), robust=True
    )
    every = {"sum.w": 4 * one, **{f"counts.{k}": np.ones(()) for k in range(4)}}
    server, step = term.update({}, {"w": one}, every, ctx)
    np.testing.assert_allclose(server["w"], -0.5 / 8 * 4 * one)
    np.testing.assert_allclose(step["w"], one + 4 / 8)
    some = {"sum.w": 4 * one, "counts.2": np.ones(())}
    server, _ = term.update({}, {"w": one}, some, ctx)
    np.testing.assert_allclose(server["w"], -0.5 / 8 * one)
    assert {key for key in every if term.adds(key)} == {"sum.w"}
