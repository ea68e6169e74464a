"""FedNova beyond the laws: a server's optimiser, and what one client's claims can do."""

from functools import partial
from typing import Any

import pytest
import torch

import flwr_regs as fr
from flwr_regs.testing.problem import app_of, start_weights, train
from tests.conftest import Tampered, claiming, close, make_clients


def test_a_servers_optimiser_gets_the_weighted_sum() -> None:
    """τ_eff and all: with lr = 0.5 the model moves by half of FedNova's step."""
    half_step = fr.TorchServerOptimizer(partial(torch.optim.SGD, lr=0.5))
    strategy = fr.RegStrategy([fr.NormalizedAveraging(), half_step], seed=3)
    half = train(strategy, partial(fr.RegClient, terms=[fr.NormalizedAveraging]), rounds=1)[0]
    whole = train(fr.FedNova(seed=3), fr.FedNovaClient, rounds=1)[0]
    start = start_weights()
    close(half, {n: (start[n] + whole[n]) / 2 for n in start}, 1e-12)


@pytest.mark.parametrize("aggregator", [fr.CoordinateMedian(), fr.NormBound(), fr.Mean()], ids=repr)
def test_one_clients_claims_do_not_lengthen_the_others_steps(aggregator: Any) -> None:
    """With local epochs a client that claims a million examples may claim as many steps."""

    strategy = fr.FedNova(seed=1, fraction_evaluate=0.0, aggregator=aggregator, weighting="uniform")
    claims = claiming(4, num_examples=10**6, local_steps=10**6, planned_steps=10**6)
    grid = Tampered(app_of(fr.FedNovaClient, make_clients(5)), 5, claims)
    model = train(strategy, fr.FedNovaClient, rounds=1, grid=grid)[0]
    assert max(abs(a - start_weights()[n]).max() for n, a in model.items()) < 2
