"""SGD's step on slices: its bits, its state, and when the optimiser takes the step itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from flwr_regs import FirstOrder, Proximal
from flwr_regs.chain import chain
from flwr_regs.client.train import corrections
from flwr_regs.client.train.local_training import local_round
from flwr_regs.client.train.sliced_sgd import SlicedSGD
from flwr_regs.term import Term

SLICE = 64  # a vector of torch's has fewer entries
SETTINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parameters of the slices on which SGD's step was taken."""
    seen: list[str] = []
    once = SlicedSGD.__call__

    def spy(self: SlicedSGD, name: str, number: int, values: Tensor, grad: Tensor) -> None:
        seen.append(name)
        once(self, name, number, values, grad)

    monkeypatch.setattr(SlicedSGD, "__call__", spy)
    monkeypatch.setattr(corrections, "SLICE", SLICE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return seen


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 5))


def trained(make: Any, model: nn.Module, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Return the model's state after 4 steps of two elementwise terms, and the optimisers."""
    made: list[torch.optim.Optimizer] = []

    def kept(params: Any, lr: float) -> torch.optim.Optimizer:
        made.append(make(params, lr=lr))
        return made[0]

    g = torch.Generator().manual_seed(1)
    model = model.to(dtype)
    data = [(torch.randn(6, 9, generator=g).to(dtype), torch.arange(6) % 5) for _ in range(2)]
    last = {n: torch.randn(p.shape, generator=g) for n, p in model.named_parameters()}
    terms: list[Term] = [FirstOrder(0.3), Proximal(0.2)]
    settings = {"lr": 0.1, "steps": 4, "device": "cpu", "broadcast": {"first-order": last}, **more}
    return local_round(model, chain(terms), data, optimizer=kept, **settings).state, made[0]


def in_whole(monkeypatch: pytest.MonkeyPatch, make: Any, **more: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(corrections, "SLICE", 2**20)
        return trained(make, mlp(), **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_bits_and_state_are_those_of_the_whole_step(
    settings: dict[str, Any],
    dtype: torch.dtype,
    steps: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        first, *others = params  # a group of its own
        return torch.optim.SGD(
            [{"params": [first], "lr": 2 * lr}, {"params": others}], lr, **settings
        )

    expected, whole = in_whole(monkeypatch, make, dtype=dtype)
    assert not steps
    got, sliced = trained(make, mlp(), dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(sliced.state_dict(), whole.state_dict(), rtol=0, atol=0)
    taken = 3 if "momentum" in settings else 4  # its first step makes the state
    assert steps == taken * [*5 * ["0.weight"], *3 * ["2.weight"], "0.bias", "2.bias"]


def hooked(see: Callable[[Any], None]) -> Any:
    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        made = torch.optim.SGD(params, lr)
        made.register_step_post_hook(lambda *_: see([p.grad.clone() for p in params]))
        return made

    return make


class Own(torch.optim.SGD):
    """A class of the user's may do anything."""


def scheduled(params: Any, lr: float) -> torch.optim.Optimizer:
    made = torch.optim.SGD(params, lr)
    torch.optim.lr_scheduler.StepLR(made, 1)  # wraps the step
    return made


LEFT: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "a class": Own,
    "a wrapped step": scheduled,
    "foreach": lambda params, lr: torch.optim.SGD(params, lr, foreach=True),
    "a tensor": lambda params, lr: torch.optim.SGD(params, torch.tensor(lr)),
    "not all parameters": lambda params, lr: torch.optim.SGD(params[1:], lr),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_any_other_optimiser_steps_itself(
    make: Any, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = in_whole(monkeypatch, make)
    got, _ = trained(make, mlp())
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not steps


def test_hooks_behind_the_step_see_the_gradients(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[Any] = []
    seen: list[Any] = []
    in_whole(monkeypatch, hooked(expected.append))
    trained(hooked(seen.append), mlp())
    assert len(seen) == 4
    assert not steps
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


def test_hooks_of_all_optimisers_count_too(steps: list[str]) -> None:
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        trained(torch.optim.SGD, mlp())
    finally:
        handle.remove()
    assert not steps


def test_clipping_needs_all_gradients(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clipped = {"config": {"clip-norm": 0.1}}
    expected, _ = in_whole(monkeypatch, torch.optim.SGD, **clipped)
    got, _ = trained(torch.optim.SGD, mlp(), **clipped)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not steps


def test_parameters_in_the_same_memory_and_half_precision(steps: list[str]) -> None:
    model = mlp()
    model[0].bias = nn.Parameter(model[0].weight.detach().view(-1)[:31])
    trained(torch.optim.SGD, model)
    trained(torch.optim.SGD, mlp(), torch.bfloat16)
    assert not steps
