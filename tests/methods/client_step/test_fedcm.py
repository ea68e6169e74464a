"""FedCM: where its momentum diverges, and what it says of the clients' own."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch

import flwr_regs as fr
from flwr_regs.client.local_training import local_round
from flwr_regs.methods.parts import once
from flwr_regs.testing.problem import Point, half_squared_error, quadratic_clients, train
from tests.conftest import make_clients, make_model

SGD = torch.optim.SGD


@pytest.mark.parametrize(("lr", "stable"), [(5.8, True), (6.2, False)])
def test_it_is_stable_as_heavy_ball_is(lr: float, stable: bool) -> None:
    """One step a round on v²/2 is ``v −= ηα v − (1 − α)(v − v_before)``: stable while ηα < 2 (2 − α)."""
    alpha = 0.5
    assert (lr * alpha < 2 * (2 - alpha)) == stable
    models = train(
        fr.FedCM(alpha, seed=3, fraction_evaluate=0.0), fr.FedCMClient, rounds=40,
        clients=quadratic_clients([1.0, 1.0], [1.0, 1.0]), model=Point, lr=lr,
        length={"local-steps": 1}, loss_fn=half_squared_error,
    )  # fmt: skip
    off = [abs(float(m["v"][0]) - 1.0) for m in models]
    assert (max(off[-2:]) < 0.5 * max(off[18:20])) == stable
    assert (max(off[-2:]) > 2 * max(off[18:20])) == (not stable)


def noted(caplog: pytest.LogCaptureFixture, make: Any, alpha: float = 0.4) -> str:
    """What a client's second round logs."""
    caplog.clear()
    once._logged.clear()
    model = make_model()
    g = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    data = make_clients()[0]
    with caplog.at_level(logging.WARNING, logger="flwr"):
        local_round(
            model, fr.ClientMomentum(alpha), data, lr=0.1, steps=2, optimizer=make, broadcast=g,
            device="cpu",
        )  # fmt: skip
    return "; ".join(r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (SGD, ""),
        (partial(SGD, momentum=0.4), ""),
        (
            partial(SGD, momentum=0.9),
            r"FedCM with alpha=0.4 and a client momentum of 0.9 repeats 6 times",
        ),
        (torch.optim.Adam, "FedCM needs SGD without momentum"),
    ],
)
def test_a_clients_own_momentum_is_noted_once(
    make: Any, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "_logged", set())
    text = noted(caplog, make)
    assert text.startswith(why)
    assert bool(text) == bool(why)
    assert ";" not in text
