"""Drives FedJAX's FedAvg and FedProx; it has no SCAFFOLD.

Runs in FedJAX's own environment, under `host.py`. FedJAX is told not to shuffle the data.
"""

from __future__ import annotations

from typing import Any

import fedjax  # type: ignore[import-not-found]
import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
import numpy as np
from fedjax.algorithms import fed_avg, fed_prox  # type: ignore[import-not-found]

jax.config.update("jax_enable_x64", True)


def drive(task: dict[str, Any]) -> dict[str, Any]:
    """Train as the task says, and return the models and points."""
    points: dict[tuple[int, int], list[dict[str, Any]]] = {}
    at = {"round": 0}

    def record(client: Any, params: Any) -> None:
        where = (at["round"], int(client))
        points.setdefault(where, []).append({n: np.array(a) for n, a in params.items()})

    def losses(params: Any, batch: Any, _: Any) -> Any:
        jax.debug.callback(record, batch["client"][0], params, ordered=True)
        hidden = jnp.tanh(batch["x"] @ params["0.weight"].T + params["0.bias"])
        logits = hidden @ params["2.weight"].T + params["2.bias"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]

    batches = fedjax.ShuffleRepeatBatchHParams(
        batch_size=task["batch_size"], num_epochs=task["epochs"], skip_shuffle=True
    )
    optimizers = (fedjax.optimizers.sgd(task["lr"]), fedjax.optimizers.sgd(1.0))
    if task["method"] == "FedAvg":
        grad = jax.grad(lambda params, batch, rng: jnp.mean(losses(params, batch, rng)))
        algorithm = fed_avg.federated_averaging(grad, *optimizers, batches)
    else:
        algorithm = fed_prox.fed_prox(losses, *optimizers, batches, task["mu"])

    def client(k: int) -> tuple[str, Any, Any]:
        data = task["clients"][k]
        columns = {"x": data["x"], "y": data["y"], "client": np.full(len(data["y"]), k)}
        return str(k), fedjax.ClientDataset(columns), jax.random.PRNGKey(k)

    state = algorithm.init({n: jnp.asarray(a) for n, a in task["parameters"].items()})
    models = []
    for cohort in task["cohorts"]:
        state, _ = algorithm.apply(state, [client(k) for k in cohort])
        jax.effects_barrier()
        models.append({n: np.array(a) for n, a in state.params.items()})
        at["round"] += 1
    return {"models": models, "points": points}
