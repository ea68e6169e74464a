"""A plain loader's batches are torch's own, from the same draws; any other loader is iterated.

A client's round seeds the device that it runs on, and no other; its batches can be drawn again.
"""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from flwr_regs.client.train.batches import Pairs, Replay, seeded

DATA = TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11))
BY_ROWS = BatchSampler(RandomSampler(DATA), 4, drop_last=False)
PLAIN: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 4},
    "shuffled": {"batch_size": 4, "shuffle": True},
    "drop_last": {"batch_size": 4, "shuffle": True, "drop_last": True},
    "no batch": {"batch_size": 12, "drop_last": True},
    "a batch sampler": {"batch_sampler": BY_ROWS},
    "batches by one indexing": {"batch_size": None, "sampler": BY_ROWS},
}
OTHERS: dict[str, dict[str, Any]] = {
    "a generator of its own": {"shuffle": True, "generator": torch.Generator()},
    "with replacement": {"sampler": RandomSampler(DATA, replacement=True)},
    "a part": {"sampler": RandomSampler(DATA, num_samples=5)},
    "other batches": {
        "collate_fn": lambda pairs: tuple(map(torch.stack, zip(*pairs, strict=True)))
    },
}


@pytest.mark.parametrize("kind", [*PLAIN, *OTHERS])
def test_batches_and_draws_are_those_of_the_loader(kind: str) -> None:
    loader = DataLoader(DATA, **{**PLAIN, **OTHERS}[kind])
    pairs = Pairs(loader)
    assert (pairs.order is not None) == (kind in PLAIN)
    given = []
    for source in (loader, pairs):
        torch.manual_seed(3)
        if loader.generator is not None:
            loader.generator.manual_seed(4)
        passes = [[tuple(batch) for batch in source] for _ in range(2)]
        given.append((passes, torch.get_rng_state()))
    torch.testing.assert_close(*given, rtol=0, atol=0)


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
