"""A client's round seeds the device that it runs on, and no other."""

import pytest
import torch

from flwr_regs.client.train.batches import seeded

CPU = torch.device("cpu")


def test_only_a_client_on_an_accelerator_seeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", given.append)
    real = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: real(devices=[]))
    with seeded(7, CPU):
        assert given == []
    with seeded(7, torch.device("cuda", 0)):
        assert given == [7]
