"""pfl-research's FedAvg on the small job: seconds of each round. Runs in pfl's own environment."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
from pfl.aggregate.weighting import WeightByDatapoints  # type: ignore[import-not-found]
from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
from pfl.algorithm.federated_averaging import (  # type: ignore[import-not-found]
    FederatedAveraging,
)
from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
from pfl.hyperparam.base import NNTrainHyperParams  # type: ignore[import-not-found]
from pfl.metrics import Metrics  # type: ignore[import-not-found]
from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]


class Net(torch.nn.Module):
    """The small job's perceptron, as pfl calls a model."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__()
        shapes = {name: array.shape for name, array in task["parameters"].items()}
        (hidden, d), (classes, _) = shapes["0.weight"], shapes["2.weight"]
        layers = (torch.nn.Linear(d, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, classes))
        self.layers = torch.nn.Sequential(*layers)
        start = {name: torch.as_tensor(a) for name, a in task["parameters"].items()}
        self.layers.load_state_dict(start)

    def loss(self, x: Any, y: Any) -> Any:
        """Return the batch's mean cross-entropy."""
        return torch.nn.functional.cross_entropy(self.layers(x), y.long())

    def metrics(self, x: Any, y: Any) -> dict[str, Any]:
        """Return no metrics; pfl asks for them."""
        return {}


def drive(task: dict[str, Any]) -> dict[str, Any]:
    """Train as the task says; return the seconds of each round as ``models``."""
    torch.set_num_threads(1)
    net, cohorts = Net(task), task["cohorts"]
    order = iter([k for cohort in cohorts for k in cohort])
    users = [
        Dataset(
            (torch.as_tensor(c["x"], dtype=torch.float32), torch.as_tensor(c["y"])),
            user_id=str(k),
        )
        for k, c in enumerate(task["clients"])
    ]
    stamps: list[float] = []

    class Record(TrainingProcessCallback):  # type: ignore[misc]
        """Notes the time before the first round, and after each."""

        def on_train_begin(self, *_: Any, **__: Any) -> Any:
            stamps.append(time.perf_counter())
            return Metrics()

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            stamps.append(time.perf_counter())
            return False, Metrics()

    params = NNAlgorithmParams(
        central_num_iterations=len(cohorts),
        evaluation_frequency=len(cohorts) + 1,
        train_cohort_size=len(cohorts[0]),
        val_cohort_size=None,
    )
    data = FederatedDataset(users.__getitem__, lambda: next(order))
    FederatedAveraging().run(
        algorithm_params=params,
        backend=SimulatedBackend(
            training_data=data, val_data=None, postprocessors=[WeightByDatapoints()]
        ),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=task["epochs"],
            local_learning_rate=task["lr"],
            local_batch_size=task["batch_size"],
        ),
        callbacks=[Record()],
    )
    return {"models": [{"seconds": np.array(b - a)} for a, b in pairwise(stamps)]}
