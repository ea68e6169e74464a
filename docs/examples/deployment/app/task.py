"""The model, the data and the method of the app: server and clients need both."""

import ast
from collections.abc import Mapping
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


def load(node_config: Mapping[str, Any]) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a client's training and test batches: two label-sorted shards of scikit-learn's digits.

    Without a ``partition-id``, the .npz file of the node's ``data-path``: images `x`, (n, 64) from 0 to 16,
    and labels `y`.
    """
    if "partition-id" in node_config:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        pid, n = int(node_config["partition-id"]), int(node_config["num-partitions"])
        shards = np.array_split(np.argsort(y, kind="stable"), 2 * n)
        mine = np.concatenate([shards[pid], shards[pid + n]])
        x, y = x[mine], y[mine]
    else:
        local = np.load(str(node_config["data-path"]))
        x, y = local["x"], local["y"]
    test = np.arange(len(y)) % 5 == 0
    inputs = torch.tensor(x / 8 - 1, dtype=torch.float32)
    sets = [TensorDataset(inputs[part], torch.tensor(y[part])) for part in (~test, test)]
    return DataLoader(sets[0], batch_size=32, shuffle=True), DataLoader(sets[1], batch_size=32)


def strategy(method: str, **settings: Any) -> Any:
    """Return the strategy of a call such as ``FedFOR(alpha=0.1)``; other settings are added to it."""
    call = ast.parse(method, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"method is {method!r}, expected a call such as 'FedFOR(alpha=0.1)'")
    first = [ast.literal_eval(value) for value in call.args]
    named = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    return getattr(flwr_regs, call.func.id)(*first, **named, **settings)
