"""A client's round draws from its own seed, whatever else the process has drawn."""

import pytest
import torch

from flwr_regs.client.member import seeded

CPU = torch.device("cpu")


def test_a_round_draws_from_its_seed_and_leaves_the_process_as_it_was() -> None:
    before = torch.get_rng_state()
    with seeded(7, CPU):
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ZeroDivisionError), seeded(8, CPU):
        torch.rand(3 // 0)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        assert torch.equal(torch.rand(3), drawn)


def test_only_a_client_on_an_accelerator_seeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", given.append)
    real = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: real(devices=[]))
    with seeded(7, CPU):
        assert given == []
    with seeded(7, torch.device("cuda", 0)):
        assert given == [7]
