"""A plain loader's batches are torch's own, from the same draws; any other loader is iterated."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from flwr_regs.client.train.batches import Pairs

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
