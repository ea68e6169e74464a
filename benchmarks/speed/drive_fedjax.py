"""FedJAX's FedAvg on the small job: seconds of each round. Runs in FedJAX's own environment."""

from __future__ import annotations

import time
from typing import Any

import fedjax  # type: ignore[import-not-found]
import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
import numpy as np
from fedjax.algorithms import fed_avg  # type: ignore[import-not-found]


def drive(task: dict[str, Any]) -> dict[str, Any]:
    """Train as the task says, in float32; return the seconds of each round as ``models``."""

    def loss(params: Any, batch: Any, _: Any) -> Any:
        hidden = jax.nn.relu(batch["x"] @ params["0.weight"].T + params["0.bias"])
        logits = hidden @ params["2.weight"].T + params["2.bias"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)
        return -jnp.mean(chosen)

    batches = fedjax.ShuffleRepeatBatchHParams(
        batch_size=task["batch_size"], num_epochs=task["epochs"]
    )
    optimizers = (fedjax.optimizers.sgd(task["lr"]), fedjax.optimizers.sgd(1.0))
    algorithm = fed_avg.federated_averaging(jax.grad(loss), *optimizers, batches)
    clients = [
        fedjax.ClientDataset({"x": c["x"].astype(np.float32), "y": c["y"].astype(np.int32)})
        for c in task["clients"]
    ]
    start = {n: jnp.asarray(a, jnp.float32) for n, a in task["parameters"].items()}
    state, found = algorithm.init(start), []
    for number, cohort in enumerate(task["cohorts"]):
        began = time.perf_counter()
        key = jax.random.PRNGKey(number)
        state, _ = algorithm.apply(state, [(str(k), clients[k], key) for k in cohort])
        jax.block_until_ready(state.params)
        found.append({"seconds": np.array(time.perf_counter() - began)})
    return {"models": found}
