"""A server that is killed when the clients have trained, and resumed: to the bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord

import flwr_regs as fr
from tests.conftest import close
from tests.flower.test_private import PINS, SAVING, grid_of, model
from tests.sampling import sampled


class Killed(Exception):
    pass


def delta(**options: Any) -> fr.RegStrategy:
    return fr.RegStrategy([fr.FirstOrder(0.5), fr.Private(PINS)], downlink="delta", **options)


METHODS = {**SAVING, "delta": (delta, fr.RegClient)}


def train(strategy: Any, grid: Any, **more: Any) -> dict[str, np.ndarray]:
    start = ArrayRecord(model().state_dict())
    length = ConfigRecord({"lr": 0.2, "local-epochs": 2})
    result = strategy.start(grid, start, 4, train_config=length, **more)
    return {n: a.numpy() for n, a in result.arrays.items()}


@sampled("name,restarted", list(product(METHODS, [True, False])), 2, str)
def test_a_resumed_training_equals_the_unbroken_one(
    name: str, restarted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nodes of which the server has no copy, living on or `restarted`."""
    monkeypatch.setattr("flwr_regs.flower.checkpoints.KeepsClients", Killed)  # as with real nodes
    build, client = METHODS[name]
    terms = {"terms": [fr.FirstOrder, fr.Private]} if client is fr.RegClient else {}
    expected = train(build(seed=1), grid_of(client, **terms))
    saving = {**terms, "save_private": tmp_path / "mine"} if restarted else terms
    grid, checkpoints = grid_of(client, **saving), tmp_path / "checkpoints"
    first = build(seed=1, checkpoint_dir=checkpoints)
    aggregate = first.aggregate_train

    def dies(number: int, replies: Any) -> Any:
        if number == 3:
            raise Killed
        return aggregate(number, replies)

    first.aggregate_train = dies
    with pytest.raises(Killed):
        train(first, grid)
    again = build(seed=1, checkpoint_dir=checkpoints)
    grid = grid_of(client, **saving) if restarted else grid
    found = train(again, grid, resume_from=checkpoints)
    close(found, expected, 0.0)
    assert not any(e["lost_private"] + e["lost_state"] for e in again.history)
    assert not any(e["failures"] for e in again.history)
