"""Drives the code that rFedAvg's authors published: rFedAvg, rFedAvg+ and its comparators.

Runs in an environment of its own, under `host.py`, on a copy of their repository. Edits: loaders do not
shuffle, cohorts are given, all clients begin with the task's parameters, in float64.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch

sys.path.insert(0, os.environ["CONFORMITY_SOURCE"])
TRAINERS = {
    "FedProx": "FedProx",
    "SCAFFOLD": "SCAFFOLD",
    "QFedAvg": "qFedAvg",
    "RFedAvg": "rFedAvg",
    "RFedAvgPlus": "rFedAvg2",
}
"""A method -> its file in src/trainers."""


def drive(task: dict[str, Any]) -> dict[str, Any]:
    """Train as the task says, and return the models."""
    torch.set_default_dtype(torch.float64)
    models: Any = importlib.import_module("src.models")
    trainer = importlib.import_module(f"src.trainers.{TRAINERS[task['method']]}")
    start, settings = task["parameters"], task["settings"]
    (hidden, inputs), (classes, _) = start["0.weight"].shape, start["2.weight"].shape

    class Perceptron(models.BaseModule):  # type: ignore[misc]
        """The task's perceptron, in the order of its parameters."""

        def __init__(self, _: Any) -> None:
            super().__init__()
            self.first = torch.nn.Linear(inputs, hidden)
            self.last = torch.nn.Linear(hidden, classes)
            for p, array in zip(self.parameters(), start.values(), strict=True):
                p.data = torch.as_tensor(array).clone()

        def forward(self, x: Any, features: bool = False) -> Any:
            """Return the logits, and with `features` what enters the last layer."""
            phi = torch.tanh(self.first(x))
            return (self.last(phi), phi) if features else self.last(phi)

    models.Perceptron = Perceptron
    params = {
        "Dataset": {},
        "Model": {"name": "Perceptron"},
        "Trainer": {
            "batch_size": task["batch_size"],
            "E": task["epochs"],
            "device": "cpu",
            "n_clients": len(task["clients"]),
            "C": 1.0,
            "optimizer": {"name": "SGD", "params": {"lr": task["lr"]}, "lr_decay": 1.0},
            "lambda": settings.get("lam", task["mu"]),
            "L": 1 / task["lr"],
            "q": settings.get("q"),
            "eta_g": 1.0,
        },
    }
    if (
        task["method"] == "FedProx"
    ):  # their lambda in the place of the paper's mu/2, as they call it
        params["Trainer"]["lambda"] = task["mu"]
    clients = []
    for k, data in enumerate(task["clients"]):
        pairs = torch.utils.data.TensorDataset(
            torch.as_tensor(data["x"]), torch.as_tensor(data["y"])
        )
        client = trainer.Client(k, params, {"train": pairs, "test": None})
        size = task["batch_size"]
        client.trainloader = torch.utils.data.DataLoader(pairs, batch_size=size, drop_last=True)
        clients.append(client)
    server = trainer.Server(-1, params, {"train": None, "test": None})
    server.clients = clients
    rounds = []
    for cohort in task["cohorts"]:
        server.sample_client = lambda cohort=cohort: [clients[k] for k in cohort]
        server.train()
        now = [p.detach().clone().numpy() for p in server.model.parameters()]
        rounds.append(dict(zip(start, now, strict=True)))
    return {"models": rounds}
