"""A client's round seeds the device that it runs on, and no other; its batches can be drawn again."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from flwr_regs.client.train.batches import Pairs, Replay, seeded

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


DATA = TensorDataset(torch.arange(12), torch.arange(12))


def sampler() -> RandomSampler:
    return RandomSampler(DATA, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "how",
    [
        {"shuffle": True, "batch_size": 2},
        {"sampler": sampler(), "batch_size": 2},
        {"sampler": BatchSampler(sampler(), 2, False), "batch_size": None},
    ],
    ids=["torch", "sampler", "batch sampler"],
)
def test_batches_come_again_whoever_shuffles_and_then_it_goes_on(how: Any) -> None:
    replay = Replay(Pairs(DataLoader(DATA, **how)), CPU, batches=True)
    first = [x for x, _ in replay.draw(9)]
    before = replay._states()
    assert all(map(torch.equal, first, [x for x, _ in replay.again(13)][:9]))
    assert all(map(torch.equal, before, replay._states()))
