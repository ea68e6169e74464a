"""Flower's scikit-learn quickstart with FedAvgM: the client is a plain NumPyClient, as it was.

``flwr run docs/examples/sklearn``; scikit-learn's handwritten digits.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from flwr_regs import FedAvgM, client_app


def create_model() -> LogisticRegression:
    model = LogisticRegression(max_iter=1, warm_start=True)  # one local epoch
    model.classes_ = np.arange(10)
    set_model_params(model, [np.zeros((10, 64)), np.zeros(10)])
    return model


def get_model_params(model: LogisticRegression) -> list[np.ndarray]:
    return [model.coef_, model.intercept_]


def set_model_params(model: LogisticRegression, params: list[np.ndarray]) -> None:
    model.coef_, model.intercept_ = params


def load_data(node_config: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    """Every n-th image; on a SuperNode without a ``partition-id``, the .npz file of its ``data-path``."""
    if "partition-id" in node_config:
        part = slice(int(node_config["partition-id"]), None, int(node_config["num-partitions"]))
        x, y = (array[part] for array in load_digits(return_X_y=True))
    else:
        local = np.load(str(node_config["data-path"]))
        x, y = local["x"], local["y"]
    split = len(y) * 4 // 5
    return x[:split] / 16, y[:split], x[split:] / 16, y[split:]


class FlowerClient(NumPyClient):
    def __init__(self, model: LogisticRegression, data: tuple[np.ndarray, ...]) -> None:
        self.model = model
        self.x_train, self.y_train, self.x_test, self.y_test = data

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        set_model_params(self.model, parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one epoch does not converge
            self.model.fit(self.x_train, self.y_train)
        return get_model_params(self.model), len(self.y_train), {}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        set_model_params(self.model, parameters)
        loss = log_loss(self.y_test, self.model.predict_proba(self.x_test), labels=range(10))
        accuracy = self.model.score(self.x_test, self.y_test)
        return float(loss), len(self.y_test), {"accuracy": float(accuracy)}


def client_fn(context: Context) -> FlowerClient:
    return FlowerClient(create_model(), load_data(context.node_config))


app = client_app(client_fn)

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvgM(momentum=0.5, seed=7)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(get_model_params(create_model())),
        num_rounds=int(context.run_config["rounds"]),
    )
    for entry in strategy.history:
        clients = entry["evaluate"]["clients"].values()
        mean = np.mean([m["accuracy"] for m in clients])
        print(f"round {entry['round']}: mean accuracy on the clients {mean:.1%}", flush=True)
