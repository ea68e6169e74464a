"""SCAFFOLD beyond the laws: c beside rounded updates."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import flwr_regs as fr
from flwr_regs.testing import spies
from flwr_regs.testing.problem import start_weights, train
from tests.conftest import make_clients, make_model


@pytest.mark.parametrize("beside", [fr.SparseTernary(0.3), None], ids=["ternary", "bfloat16"])
def test_c_is_the_clients_own_mean_where_updates_are_rounded(beside: Any) -> None:
    """Else Σ c_k / N would differ from c by what compression leaves out."""
    terms = [fr.ControlVariates(), *([beside] if beside else [])]
    half = {} if beside else {"wire_dtype": "bfloat16"}
    strategy = fr.RegStrategy(terms, seed=3, fraction_evaluate=0.0, **half)
    client = partial(fr.RegClient, terms=[type(t) for t in terms])
    data, model = make_clients(4, torch.float32), partial(make_model, torch.float32)
    calls: list[spies.LocalCall] = []
    with spies.recorded(calls):
        train(strategy, client, rounds=6, clients=data, model=model)
    c = strategy.training.model.server["scaffold"]
    for n in start_weights():
        mean = sum(call.result.client["scaffold"][n].numpy() for call in calls[-4:]) / 4
        np.testing.assert_allclose(c[f"c.{n}"], mean, rtol=0, atol=1e-6)
