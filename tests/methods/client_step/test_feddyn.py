"""FedDyn beyond the laws: entries without h, and robust aggregators."""

from functools import partial

import numpy as np

import flwr_regs as fr
from flwr_regs.term import ServerContext
from flwr_regs.testing.problem import train
from tests.conftest import norm_model


def test_batch_norm_that_stays_with_the_clients_has_no_h() -> None:
    terms = [fr.LocalBatchNorm(), fr.DynamicRegulariser(0.3)]
    strategy = fr.RegStrategy(terms, seed=3, fraction_evaluate=0.0)
    client = partial(fr.RegClient, terms=[type(t) for t in terms])
    train(strategy, client, rounds=2, model=norm_model)
    h = strategy.training.model.server["feddyn"]
    assert set(h) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    # a bias in front of BatchNorm has no gradient
    assert min(abs(a).max() for n, a in h.items() if n != "0.bias") > 1e-4


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
