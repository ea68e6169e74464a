"""What a round loads into a client's model."""

import numpy as np
import pytest
import torch
from torch import nn

from flwr_regs import FedBN, FedPer
from flwr_regs.chain import Chain
from flwr_regs.client.loading import load


def values_of(model: nn.Module) -> dict[str, np.ndarray]:
    """Other values than the model's."""
    return {
        n: (torch.arange(v.numel()).reshape(v.shape) + v.ndim + 1).to(v.dtype).numpy()
        for n, v in model.state_dict().items()
    }


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
