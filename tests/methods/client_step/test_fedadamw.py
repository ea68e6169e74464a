"""FedAdamW beyond the laws: a client's own AdamW, and entries that stay with the client."""

from functools import partial
from typing import Any

import pytest
import torch

import flwr_regs as fr
from flwr_regs.testing.problem import make_clients, start_weights, to_numpy, train
from tests.conftest import close, norm_model
from tests.oracles.client_step.fedadamw import fedadamw

OWN = partial(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)


@pytest.mark.parametrize("where", ["config", "client"])
def test_an_adamw_of_the_clients_own_keeps_its_settings(where: str) -> None:
    settings: dict[str, Any] = {"decay": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
    length, own = {"local-steps": 3}, {"optimizer": OWN}
    if where == "config":
        settings, own = {"decay": 0.1}, {}
        length |= {"optimizer": "AdamW", "weight-decay": 0.1}
    strategy = fr.FedAdamW(seed=3, fraction_evaluate=0.0)
    models = train(strategy, fr.FedAdamWClient, lr=0.02, length=length, **own)
    clients = to_numpy(make_clients())
    expected = fedadamw(start_weights(), clients, 4, lambda t: 0.02, local_steps=3, **settings)
    for ours, theirs in zip(models, expected, strict=True):
        close(ours, theirs, 1e-10)


def test_what_stays_with_a_client_begins_with_moments_of_its_own() -> None:
    """Its step count is that of the round, the others' that of the run."""
    terms = [fr.LocalBatchNorm(), fr.SharedMoments()]
    strategy = fr.RegStrategy(terms, seed=3, fraction_evaluate=0.0)
    client = partial(fr.RegClient, terms=[type(t) for t in terms])
    train(strategy, client, rounds=3, model=norm_model, lr=0.02, length={"local-steps": 4})
    server = {**strategy.training.model.server["fedadamw"]}
    assert server.pop("step") == 12
    assert set(server) == {f"exp_avg_sq.{i}.{n}" for i in "03" for n in ("weight", "bias")}
    assert [e["failures"] for e in strategy.history] == [{}] * 3
