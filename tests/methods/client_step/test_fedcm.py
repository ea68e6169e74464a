"""FedCM: what it says of the clients' own momentum, and K_k under `incomplete="scale"`."""

import logging
from functools import partial
from typing import Any

import pytest
import torch

import flwr_regs as fr
from flwr_regs.client.local_training import local_round
from flwr_regs.methods.parts import once
from flwr_regs.wire import keys
from tests.conftest import Log, make_clients, make_model

SGD = torch.optim.SGD


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (SGD, ""),
        (partial(SGD, momentum=0.4), ""),
        (partial(SGD, momentum=0.9), "alpha=0.4 and a client momentum of 0.9 repeats 6 times"),
        (torch.optim.Adam, "FedCM needs SGD without momentum"),
    ],
)
def test_a_clients_own_momentum_is_noted_once(
    make: Any, why: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "_logged", set())
    model = make_model()
    g = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    local_round(
        model, fr.ClientMomentum(0.4), make_clients()[0], lr=0.1, steps=2, optimizer=make,
        broadcast=g, device="cpu"
    )  # fmt: skip
    assert [why in said for said in log(level=logging.WARNING)] == ([True] if why else [])


def test_under_scale_it_spreads_the_step_over_the_planned_steps() -> None:
    """The server multiplies the update by E / s_k; so it repeats the same part of the last step."""
    data = [(torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.long))]
    model = make_model()
    for p in (model[2].weight, model[2].bias):  # all that has a gradient here
        p.requires_grad_(False)
    g = {n: torch.ones_like(p) for n, p in model.named_parameters() if p.requires_grad}
    for config, steps in (({}, 3), ({keys.INCOMPLETE_KEY: "scale"}, 6)):
        moved = local_round(
            model, fr.ClientMomentum(0.25), data, lr=0.1, steps=6, max_steps=3,
            broadcast=g, config=config, device="cpu"
        ).delta["0.weight"]  # fmt: skip
        expected = torch.full_like(g["0.weight"], -0.1 * 0.75 * 3 / steps)
        torch.testing.assert_close(moved, expected)
