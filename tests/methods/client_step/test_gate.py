"""VRL-SGD and FedGATE beyond the laws: a server's optimiser, and the means that clients still need."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import flwr_regs as fr
from flwr_regs.term import ServerContext
from flwr_regs.testing.problem import train
from tests.conftest import close
from tests.experiments.runs import strategy_of


def test_the_mean_is_that_before_a_servers_optimiser() -> None:
    """SGD with lr = γ on the server is FedGATE; the parts are put in the order that this needs."""
    text = "VRLSGD()+FedOpt(server_optimizer='SGD', lr=0.6)+SparseTernary(0.5)"
    names = [t.name for t in strategy_of(text).term.terms]
    assert names == ["server-optimizer", "gradient-tracking", "ternary"]
    shorter = fr.TorchServerOptimizer(partial(torch.optim.SGD, lr=0.6))
    terms = [shorter, fr.GradientTracking()]
    strategy = fr.RegStrategy(terms, seed=3, weighting="uniform")
    a = train(strategy, partial(fr.RegClient, terms=[fr.GradientTracking]))
    b = train(fr.FedGATE(0.6, seed=3), fr.FedGATEClient)
    close(a[-1], b[-1], 1e-12)
    with pytest.raises(ValueError, match="put them behind 'server-optimizer'"):
        fr.RegStrategy(terms[::-1])


def test_the_server_keeps_the_means_that_clients_still_need() -> None:
    """`uploads` has those whose state counts; a client that was left out needs its old mean."""
    term, w = fr.GradientTracking(), {"w": np.zeros(2)}
    server: Any = {}
    for number, counted in ((1, [0, 1]), (2, [1]), (3, [1])):
        ctx = ServerContext(number, 0.1, w, population=2, weights={0: 0.5, 1: 0.5})
        delta = {"w": np.full(2, float(number))}
        server, _ = term.update(server, delta, {k: {} for k in counted}, ctx)
    assert set(server) == {"last.0", "last.1", "1.w", "3.w"}
    assert term.broadcast_to(0, server, ctx)["w"][0] == 1
    assert term.broadcast_to(1, server, ctx)["w"][0] == 3
    assert term.broadcast_to(7, server, ctx) == {}
