"""FedNova beyond the laws: a server's optimiser."""

from functools import partial

import torch

import flwr_regs as fr
from flwr_regs.testing.problem import start_weights, train
from tests.conftest import close


def test_a_servers_optimiser_gets_the_weighted_sum() -> None:
    """τ_eff and all: with lr = 0.5 the model moves by half of FedNova's step."""
    half_step = fr.TorchServerOptimizer(partial(torch.optim.SGD, lr=0.5))
    strategy = fr.RegStrategy([fr.NormalizedAveraging(), half_step], seed=3)
    half = train(strategy, partial(fr.RegClient, terms=[fr.NormalizedAveraging]), rounds=1)[0]
    whole = train(fr.FedNova(seed=3), fr.FedNovaClient, rounds=1)[0]
    start = start_weights()
    close(half, {n: (start[n] + whole[n]) / 2 for n in start}, 1e-12)
