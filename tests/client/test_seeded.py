"""A client's round draws from its own seed, whatever else the process has drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flwr_regs.client import member as received
from flwr_regs.client.member import seeded

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


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


@pytest.mark.parametrize(
    ("device", "module", "whole"),
    [
        (CPU, None, False),  # a machine without an accelerator
        (CPU, SimpleNamespace(is_initialized=lambda: False), False),
        (CPU, SimpleNamespace(is_initialized=lambda: True), True),
        (CPU, SimpleNamespace(), True),  # as torch.mps, which cannot say
        (CUDA, SimpleNamespace(is_initialized=lambda: False), True),
    ],
)
def test_an_accelerator_is_seeded_if_it_may_draw(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, module: Any, whole: bool
) -> None:
    given: list[int] = []
    monkeypatch.setattr(received, "_accelerator", lambda: None if module is None else CUDA)
    if module is not None:
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch, "manual_seed", given.append)
    real = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: real(devices=[]))
    with seeded(7, device):
        pass
    assert given == [7] * whole
