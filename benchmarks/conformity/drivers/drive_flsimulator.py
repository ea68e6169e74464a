"""Drives FL-Simulator: FedSpeed, FedSMOO and FedInit by their authors, FedSAM and FedGAMMA beside them.

Runs in an environment of its own, under `host.py`, on a copy of their repository. Servers and clients train
with their own code. Edits: loaders do not shuffle, cohorts and the first model are given, in float64, and
nothing is tested or saved.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, os.environ["CONFORMITY_SOURCE"])
SERVERS = {"FedGAMMA": "FedGamma", "FedInit": "FedAvg"}
"""Where a method's class has another name; FedInit is a switch of FedAvg."""


def in_order(dataset: Any, batch_size: int, **_: Any) -> Any:
    """Return a loader of the data in order."""
    return torch.utils.data.DataLoader(dataset, batch_size)


def drive(task: dict[str, Any]) -> dict[str, Any]:
    """Train as the task says, and return the models."""
    torch.set_default_dtype(torch.float64)
    dataset: Any = ModuleType("dataset")  # theirs reads pictures
    dataset.Dataset = lambda x, y, **_: torch.utils.data.TensorDataset(x, y)
    sys.modules["dataset"] = dataset
    method, settings, start = task["method"], task["settings"], task["parameters"]
    servers = importlib.import_module("server")
    client: Any = importlib.import_module("client.client")
    client.data = SimpleNamespace(DataLoader=in_order)
    (hidden, inputs), (classes, _) = start["0.weight"].shape, start["2.weight"].shape

    def net() -> Any:
        layers = (torch.nn.Linear(inputs, hidden), torch.nn.Tanh())
        return torch.nn.Sequential(*layers, torch.nn.Linear(hidden, classes))

    first = net()
    first.load_state_dict({name: torch.as_tensor(array) for name, array in start.items()})
    args = SimpleNamespace(
        method=method,
        total_client=len(task["clients"]),
        comm_rounds=len(task["cohorts"]),
        local_epochs=task["epochs"],
        local_learning_rate=task["lr"],
        global_learning_rate=1.0,
        lr_decay=1.0,
        batchsize=task["batch_size"],
        weight_decay=0.0,
        dataset="none",
        use_RI=method == "FedInit",
        beta=settings.get("beta"),
        rho=settings.get("rho"),
        lamb=settings.get("lam"),
    )
    data = SimpleNamespace(
        client_x=[torch.as_tensor(each["x"]) for each in task["clients"]],
        client_y=[torch.as_tensor(each["y"]) for each in task["clients"]],
    )
    vector = torch.cat([p.detach().reshape(-1) for p in first.parameters()])
    make = getattr(servers, SERVERS.get(method, method))
    server = make("cpu", net, first, vector, data, method, args)
    models: list[dict[str, Any]] = []

    def keep(*_: Any) -> None:
        now = [p.detach().clone().numpy() for p in server.server_model.parameters()]
        models.append(dict(zip(start, now, strict=True)))

    server._activate_clients_ = lambda t: np.array(task["cohorts"][t])
    server._test_, server._save_results_, server._summary_ = keep, lambda: None, lambda: None
    server.train()
    return {"models": models}
