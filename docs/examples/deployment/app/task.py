"""The model, the data and the method of the app: server and clients need both."""

import ast
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flwr_regs


def build() -> nn.Module:
    """Return the initial model: the same on the server and on each client."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def load(partition: int, partitions: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a client's training and test batches: two label-sorted shards of scikit-learn's digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    shards = np.array_split(np.argsort(y, kind="stable"), 2 * partitions)
    mine = np.concatenate([shards[partition], shards[partition + partitions]])
    test = np.arange(len(mine)) % 5 == 0
    inputs = torch.tensor(x[mine] / 8 - 1, dtype=torch.float32)
    sets = [TensorDataset(inputs[part], torch.tensor(y[mine][part])) for part in (~test, test)]
    return DataLoader(sets[0], batch_size=32, shuffle=True), DataLoader(sets[1], batch_size=32)


def strategy(method: str, **settings: Any) -> Any:
    """Return the strategy of a call such as ``FedFOR(alpha=0.1)``; other settings are added to it."""
    call = ast.parse(method, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"method is {method!r}, expected a call such as 'FedFOR(alpha=0.1)'")
    arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    return getattr(flwr_regs, call.func.id)(**arguments, **settings)
