"""Drives FedLESAM's perturbation, in the optimiser that its authors published.

Runs in an environment of its own, under `host.py`, on a copy of their repository. The optimiser
(optimizer/LESAM.py) is theirs. The loop around it is written here after client/fedlesam.py and
server/FedLESAM.py, without shuffling, augmentation and clipping.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch


def drive(task: dict[str, Any]) -> dict[str, Any]:
    """Train as the task says, and return the models."""
    path = Path(os.environ["CONFORMITY_SOURCE"], "optimizer", "LESAM.py")
    spec = importlib.util.spec_from_file_location("lesam", path)
    assert spec is not None
    assert spec.loader is not None
    lesam = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lesam)
    torch.set_default_dtype(torch.float64)
    w = {name: torch.as_tensor(array) for name, array in task["parameters"].items()}
    (hidden, inputs), (classes, _) = w["0.weight"].shape, w["2.weight"].shape
    step, models, size = None, [], task["batch_size"]
    for cohort in task["cohorts"]:
        ends = []
        for k in cohort:
            x, y = (torch.as_tensor(task["clients"][k][n]) for n in ("x", "y"))
            layers = (
                torch.nn.Linear(inputs, hidden),
                torch.nn.Tanh(),
                torch.nn.Linear(hidden, classes),
            )
            net = torch.nn.Sequential(*layers)
            net.load_state_dict(w)
            sgd = torch.optim.SGD(net.parameters(), lr=task["lr"])
            optimiser = lesam.LESAM(net.parameters(), sgd, rho=task["settings"]["rho"])
            for _ in range(task["epochs"]):
                for i in range(0, len(y), size):
                    batch = x[i : i + size], y[i : i + size]
                    optimiser.paras = [*batch, torch.nn.functional.cross_entropy, net]
                    optimiser.step(step)
                    sgd.step()
            ends.append(net.state_dict())
        mean = {name: torch.stack([end[name] for end in ends]).mean(0) for name in w}
        step = torch.cat([(mean[name] - w[name]).ravel() for name in w])
        w = mean
        models.append({name: array.numpy() for name, array in w.items()})
    return {"models": models}
