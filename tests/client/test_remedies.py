"""What torch refuses, and what loses its numbers, is explained at the batch where it happens."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flwr_regs as fr
from flwr_regs.chain import Chain
from flwr_regs.client.local_training import local_round
from flwr_regs.testing.problem import train

X, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
LOST = X.clone()
LOST[5, 2] = float("nan")


def loader(x: Any, y: Any, batch_size: int = 4, **how: Any) -> Any:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **how)


CASES = [
    # data, and what helps
    (loader(X, Y + 1), "a label is 3, but the model has 3 outputs, for labels from 0 to 2"),
    (loader(X, Y - 1), "a label is -1, but the model has 3 outputs"),
    (loader(X, Y.float()), r"the labels are torch\.float32, expected torch\.int64: give y\.long"),
    (loader(X, Y[:, None]), r"labels have the shape \(4, 1\), expected \(4,\): give y\.squeeze"),
    (loader(X, nn.functional.one_hot(Y)), r"the labels are one-hot integers .*give y\.argmax\(1\)"),
    (loader(X[:, :3], Y), r"the shape \(3,\): a linear layer of the model gets 3 numbers, but"),
    (loader(X.double(), Y), r"the inputs are torch\.float64, not torch\.float32: give x\.to"),
    ([((X * 9).to(torch.uint8), Y)], r"the inputs are torch\.uint8, not torch\.float32"),
    ([{"x": X, "i": Y, "label": Y}], r"here \['x', 'i'\], all go into the model; leave out of"),
    (loader(X, Y), "one example, and BatchNorm needs two in training: .*drop_last=True"),
    (loader(LOST, Y, 3, drop_last=True), "example 5 of train_data holds NaN or infinity"),
    ([(LOST[:3], Y[:3]), (LOST[3:], Y[3:])], "example 2 of batch 1 of train_data holds NaN"),
]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.mark.parametrize(("data", "message"), CASES)
def test_an_error_of_torch_says_what_helps(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local_round(net(), Chain(()), data, lr=0.1, epochs=1, device="cpu")
    with pytest.raises(fr.RoundFailed, match=message):
        train(fr.FedAvg(seed=0), fr.FedAvgClient, rounds=1, clients=[data, data], model=net)


class Mistaken(nn.Linear):
    def forward(self, x: Any, i: Any) -> Any:
        return super().forward(x, j=i)  # type: ignore[call-arg]


def test_a_mistake_inside_the_model_is_not_blamed_on_the_data() -> None:
    batch = {"x": X, "i": Y, "label": Y}
    with pytest.raises(TypeError, match=r"'j'$"):
        local_round(Mistaken(4, 3), Chain(()), [batch], lr=0.1, epochs=1, device="cpu")
