"""The global model is loaded as ``load_state_dict`` loads it, whichever way is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flwr_regs import FedBN, FedPer
from flwr_regs.chain import Chain, chain
from flwr_regs.client.loading import load


class Doubled(nn.Linear):
    """Loads and saves in a way of its own."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any, **how: Any) -> None:
        state = {**state, f"{prefix}weight": 2 * state[f"{prefix}weight"]}
        super()._load_from_state_dict(state, prefix, *args, **how)


def hooked() -> nn.Module:
    layer = nn.Linear(2, 3)

    def zero(module: Any, keys: Any) -> None:
        module.bias.data.zero_()

    layer.register_load_state_dict_post_hook(zero)
    return layer


def tied() -> nn.Module:
    first = nn.Linear(3, 3)
    return nn.ModuleDict({"a": first, "b": nn.Sequential(nn.Linear(3, 3), first)})


MODELS: dict[str, Any] = {
    "plain": lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2).half()),
    "tied": tied,
    "buffers": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
    "frozen": lambda: nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 2)),
    "own way": lambda: nn.Sequential(Doubled(2, 3), nn.Linear(3, 2)),
    "hook": lambda: nn.Sequential(hooked(), nn.Linear(3, 2)),
    "parametrised": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
}


def values_of(model: nn.Module) -> dict[str, np.ndarray]:
    """Other values than the model's; tied weights stay equal."""
    return {
        n: (torch.arange(v.numel()).reshape(v.shape) + v.ndim + 1).to(v.dtype).numpy()
        for n, v in model.state_dict().items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_loaded_as_torch_loads_it(name: str) -> None:
    torch.manual_seed(0)
    model, other = MODELS[name](), MODELS[name]()
    arrays = values_of(model)
    load(model, chain([]), arrays, {})
    other.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()})
    for (n, found), expected in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected), n
    assert all(p.requires_grad or name == "frozen" for p in model.parameters())
    assert all(p.is_leaf and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("term", [FedBN().term, FedPer("1.*").term])
def test_private_entries_come_from_the_node(term: Chain) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    arrays = values_of(model)
    mine = {n: a + 1 for n, a in arrays.items() if n in term.private(list(arrays))}
    shared = {n: a for n, a in arrays.items() if n not in mine}
    own = {n: torch.as_tensor(a) for n, a in mine.items()}
    private = load(model, term, shared, {}, own).private
    assert private == list(mine) != []
    for n, v in model.state_dict().items():
        np.testing.assert_array_equal(v.numpy(), {**shared, **mine}[n])
