"""The client side: one partition's data, and the client class of whichever method the server runs."""

from __future__ import annotations

from typing import Any

from flwr.app import Context, Message
from flwr.client import NumPyClient

from flwr_regs import client_app


def method_mod(message: Message, context: Context, call_next: Any) -> Message:
    """Tell `client_fn` which method this message is of: a comparison runs several in one app."""
    config: dict[str, Any] = dict(message.content.config_records.get("config") or {})
    method = str(config.get("regs.method", "FedAvg"))
    told = Context(  # a copy: Flower refuses a changed run_config; the state is the node's own
        context.run_id,
        context.node_id,
        context.node_config,
        context.state,
        {**context.run_config, "method": method},
    )
    return call_next(message, told)  # type: ignore[no-any-return]


def client_fn(context: Context) -> NumPyClient:
    """Build the client of ``node_config["partition-id"]``."""
    # Imported here: on a SuperNode every message starts a process that loads this file.
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

    import flwr_regs
    from simulations import data, models
    from simulations.job import Job

    settings = dict(context.run_config)
    method = settings.pop("method")
    job = Job.from_run_config(settings)
    dataset = data.load(job.dataset, job.data_dir)
    parts = job.parts(dataset.train_y, int(context.node_config["num-partitions"]))
    held_out, trained = job.split(parts[int(context.node_config["partition-id"])])

    def tensors(rows: Any) -> TensorDataset:
        x, y = dataset.train_x[rows], dataset.train_y[rows]
        return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

    train = tensors(trained)
    client_class = getattr(flwr_regs, f"{method}Client")
    client: NumPyClient = client_class(
        models.build(job.dataset, job.model, job.seed),
        # Shuffled batches, each cut from the tensors in one go.
        DataLoader(
            train,
            batch_size=None,
            sampler=BatchSampler(RandomSampler(train), job.batch_size, drop_last=False),
        ),
        DataLoader(tensors(held_out), batch_size=1000) if len(held_out) else None,
        share_label_counts=True,  # simulated data has no secrets
    )
    return client


app = client_app(client_fn, mods=[method_mod])
