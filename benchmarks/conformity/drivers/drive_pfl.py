"""Drives pfl's FedAvg, FedProx and SCAFFOLD, with torch, through its simulated backend.

Runs in pfl's own environment, under `host.py`. pfl forms the batches in the data's order.
"""

from __future__ import annotations

from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
from pfl.aggregate.weighting import (  # type: ignore[import-not-found]
    WeightByDatapoints,
    WeightByUser,
)
from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
from pfl.algorithm.federated_averaging import (  # type: ignore[import-not-found]
    FederatedAveraging,
)
from pfl.algorithm.fedprox import FedProx, FedProxParams  # type: ignore[import-not-found]
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams  # type: ignore[import-not-found]
from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
from pfl.data.user_state import InMemoryUserStateStorage  # type: ignore[import-not-found]
from pfl.hyperparam.base import NNTrainHyperParams  # type: ignore[import-not-found]
from pfl.metrics import Metrics  # type: ignore[import-not-found]
from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]


class Net(torch.nn.Module):
    """The task's perceptron; records the parameters wherever a mini-batch's loss is computed."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__()
        shapes = {name: array.shape for name, array in task["parameters"].items()}
        (hidden, d), (classes, _) = shapes["0.weight"], shapes["2.weight"]
        layers = (torch.nn.Linear(d, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, classes))
        self.layers = torch.nn.Sequential(*layers)
        start = {name: torch.as_tensor(a) for name, a in task["parameters"].items()}
        self.layers.load_state_dict(start)
        self.round, self.batch_size = 0, task["batch_size"]
        self.points: dict[tuple[int, int], list[dict[str, Any]]] = {}

    def now(self) -> dict[str, Any]:
        """Return the parameters, by the task's names."""
        return {n: p.detach().clone().numpy() for n, p in self.layers.named_parameters()}

    def loss(self, x: Any, y: Any, client: int = -1) -> Any:
        """Return the batch's mean cross-entropy; a batch of all data is SCAFFOLD's option I."""
        if len(y) <= self.batch_size:
            self.points.setdefault((self.round, client), []).append(self.now())
        return torch.nn.functional.cross_entropy(self.layers(x), y.long())

    def metrics(self, x: Any, y: Any) -> dict[str, Any]:
        """Return no metrics; pfl asks for them."""
        return {}


def drive(task: dict[str, Any]) -> dict[str, Any]:
    """Train as the task says, and return the models and points."""
    net, cohorts, models = Net(task), task["cohorts"], []
    order = iter([k for cohort in cohorts for k in cohort])
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))

    def user(k: int) -> Any:
        data = task["clients"][k]
        raw = (torch.as_tensor(data["x"], dtype=torch.float32), torch.as_tensor(data["y"]))
        return Dataset(raw, user_id=str(k), train_kwargs={"client": k})

    class Record(TrainingProcessCallback):  # type: ignore[misc]
        """Keeps the model after each round."""

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            models.append(net.now())
            net.round += 1
            return False, Metrics()

    shared = {
        "central_num_iterations": len(cohorts),
        "evaluation_frequency": len(cohorts) + 1,
        "train_cohort_size": len(cohorts[0]),
        "val_cohort_size": None,
    }
    if task["method"] == "FedAvg":
        algorithm, params = FederatedAveraging(), NNAlgorithmParams(**shared)
    elif task["method"] == "FedProx":
        algorithm, params = FedProx(), FedProxParams(**shared, mu=task["mu"])
    else:
        algorithm = SCAFFOLD()
        params = SCAFFOLDParams(
            **shared,
            population=len(task["clients"]),
            use_gradient_as_control_variate=task["method"] == "SCAFFOLD-1",
            user_state_storage=InMemoryUserStateStorage(),
        )
    weigh = WeightByDatapoints() if task["weights"] == "examples" else WeightByUser()
    data = FederatedDataset(user, lambda: next(order))
    algorithm.run(
        algorithm_params=params,
        backend=SimulatedBackend(training_data=data, val_data=None, postprocessors=[weigh]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=task["epochs"],
            local_learning_rate=task["lr"],
            local_batch_size=task["batch_size"],
        ),
        callbacks=[Record()],
    )
    return {"models": models, "points": net.points}
