"""Drives Flower's strategies; its clients' training is the user's, and so the kit's own here.

Runs in an environment of its own, under `host.py`. The strategies take models in float64.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as strategies
from flwr.supercore.task_identity import TaskIdentity

sys.path.insert(0, str(Path(__file__).parents[1]))
from model import gradient  # type: ignore[import-not-found]


def trained(task: dict[str, Any], k: int, w: dict[str, Any]) -> dict[str, Any]:
    """Return client k's model: plain SGD over its data in order."""
    x, y, size = task["clients"][k]["x"], task["clients"][k]["y"], task["batch_size"]
    for _ in range(task["epochs"]):
        for i in range(0, len(y), size):
            grad, _ = gradient(w, (x[i : i + size], y[i : i + size]))
            w = {name: w[name] - task["lr"] * grad[name] for name in w}
    return w


class Nodes:
    """The part of a grid that a strategy asks: which nodes there are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_node_ids(self) -> list[int]:
        """Return one id for each client of a cohort."""
        return list(range(1, self.count + 1))


def drive(task: dict[str, Any]) -> dict[str, Any]:
    """Train as the task says, and return the models."""
    names = {"server_lr": "eta", "beta_1": "beta_1", "beta_2": "beta_2", "tau": "tau"}
    if task["method"] == "FedAvgM":
        names = {"server_lr": "server_learning_rate", "momentum": "server_momentum"}
    if task["method"] == "FedAdagrad":
        names = {"server_lr": "eta", "tau": "tau"}
    settings = {names[n]: value for n, value in task["settings"].items() if n in names}
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # a message asks for it
    strategy = getattr(strategies, task["method"])(**settings)
    w, models = task["parameters"], []
    for t, cohort in enumerate(task["cohorts"], 1):
        arrays = ArrayRecord({name: Array(array) for name, array in w.items()})
        asked = strategy.configure_train(t, arrays, ConfigRecord(), Nodes(len(cohort)))
        replies = []
        for k, message in zip(cohort, asked, strict=True):
            end = {name: Array(array) for name, array in trained(task, k, w).items()}
            metrics = MetricRecord({"num-examples": len(task["clients"][k]["y"])})
            content = RecordDict({"arrays": ArrayRecord(end), "metrics": metrics})
            replies.append(Message(content, reply_to=message))
        w = {name: array.numpy() for name, array in strategy.aggregate_train(t, replies)[0].items()}
        models.append(w)
    return {"models": models}
