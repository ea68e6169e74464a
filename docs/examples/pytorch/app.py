"""Flower's PyTorch quickstart with FedFOR: batches are dicts, as Flower Datasets makes them.

``flwr run docs/examples/pytorch``; scikit-learn's handwritten digits, two label-sorted shards a client. A
SuperNode whose config has a ``data-path`` in place of a ``partition-id`` trains on that .npz file: images
`x`, (n, 64) from 0 to 16, and labels `y`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

from flwr_regs import FedFOR, FedFORClient, client_app


class Net(nn.Module):
    """A small CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc1 = nn.Linear(8 * 3 * 3, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


class Partition(Dataset[dict[str, Any]]):
    """Stands for a partition of Flower Datasets: rows are dicts, with a transform."""

    def __init__(self, rows: np.ndarray, labels: np.ndarray) -> None:
        self.rows, self.labels = rows, labels
        self.transform: Callable[[np.ndarray], Any] = lambda row: row

    def with_transform(self, transform: Callable[[np.ndarray], Any]) -> "Partition":
        self.transform = transform
        return self

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"img": self.transform(self.rows[i]), "label": int(self.labels[i])}


def load_partition(node_config: Mapping[str, Any]) -> Partition:
    if "partition-id" not in node_config:
        local = np.load(str(node_config["data-path"]))
        return Partition(local["x"], local["y"])
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    pid, n = int(node_config["partition-id"]), int(node_config["num-partitions"])
    shards = np.array_split(np.argsort(y, kind="stable"), 2 * n)
    mine = np.concatenate([shards[pid], shards[pid + n]])
    return Partition(x[mine], y[mine])


def apply_transforms(row: np.ndarray) -> torch.Tensor:
    return torch.tensor(row / 8 - 1, dtype=torch.float32).reshape(1, 8, 8)


def load_data(node_config: Mapping[str, Any]) -> tuple[Any, Any]:
    partition = load_partition(node_config).with_transform(apply_transforms)
    splits = random_split(partition, [0.8, 0.2], torch.Generator().manual_seed(42))
    return DataLoader(splits[0], batch_size=32, shuffle=True), DataLoader(splits[1], batch_size=32)


def client_fn(context: Context) -> FedFORClient:
    trainloader, testloader = load_data(context.node_config)
    return FedFORClient(Net(), trainloader, testloader)


app = client_app(client_fn)

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    torch.manual_seed(0)
    strategy = FedFOR(seed=7)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(config.get("num-server-rounds") or config["rounds"]),
        train_config=ConfigRecord(
            {
                "lr": float(config.get("learning-rate", 0.1)),
                "local-epochs": int(config.get("local-epochs", 2)),
            }
        ),
    )
    for entry in strategy.history:
        clients = entry["evaluate"]["clients"].values()
        mean = np.mean([m["accuracy"] for m in clients])
        print(f"round {entry['round']}: mean accuracy on the clients {mean:.1%}", flush=True)
