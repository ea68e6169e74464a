"""The client side: one partition's data, and a client of the method that the server runs."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.client import NumPyClient

from flwr_regs import client_app
from flwr_regs.flower.mods import ContextMod

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

    from flwr_regs.experiments.job import Job


def _with_method(message: Message, context: Context) -> Context:
    """Pass the message's method and round to `client_fn`: a comparison runs several methods in one app."""
    config: dict[str, Any] = dict(message.content.config_records.get("config") or {})
    current: dict[str, str | int] = {
        "method": str(config.get("regs.method", "")),  # a query has none
        "round": int(config.get("server-round", 0)),
    }
    return Context(  # Flower refuses a changed run_config; the state is the node's own
        context.run_id,
        context.node_id,
        context.node_config,
        context.state,
        {**context.run_config, **current},
    )


@lru_cache(maxsize=8)  # five domains; keeps a client's images from message to message
def _data(
    job: Job, num_partitions: int, pid: int, server_round: int = 0
) -> tuple[TensorDataset, TensorDataset | None]:
    """Return a client's training data in a round, and its test data if it tests."""
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    from flwr_regs.experiments import data, domains, shifts
    from flwr_regs.experiments.augment import Augmented

    dataset = job.data()
    held_out, trained = job.split(job.rows(dataset, num_partitions, pid, server_round))

    def tensors(x: Any, y: Any, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        if job.dataset.endswith("-domains"):
            x = domains.shifted(x, pid % len(domains.DOMAINS), job.seed + len(y))
        if job.partition == "noise":
            x = shifts.noisy(x, pid, num_partitions, job.noise_level, job.seed, part)
        y = job.labels(y, dataset.num_classes, server_round)
        return torch.from_numpy(x), torch.from_numpy(y)

    own = tensors(dataset.train_x[trained], dataset.train_y[trained], 0)
    train = Augmented(dataset.augment, *own) if dataset.augment else TensorDataset(*own)
    if len(held_out):
        x = data.untouched(dataset.train_x[held_out], dataset.augment)
        return train, TensorDataset(*tensors(x, dataset.train_y[held_out], 1))
    if not job.tested_on_clients:
        return train, None
    mine = job.test_rows(dataset, num_partitions, pid)
    if job.test_examples:
        mine = np.random.default_rng((job.seed, pid)).permutation(mine)[: job.test_examples]
    return train, TensorDataset(*tensors(dataset.test_x[mine], dataset.test_y[mine], 1))


def client_fn(context: Context) -> NumPyClient:
    """Build the client of ``node_config["partition-id"]``."""
    # Imported here: on a SuperNode every message starts a process that loads this file.
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    from flwr_regs.experiments import models
    from flwr_regs.experiments.build import bare, client_class
    from flwr_regs.experiments.job import Job
    from flwr_regs.experiments.quadratic import LOSSES

    settings = dict(context.run_config)
    method, server_round = str(settings.pop("method")), int(settings.pop("round"))
    job = Job.from_run_config(settings)
    pid = int(context.node_config["partition-id"])
    total = int(context.node_config["num-partitions"])
    train, test = _data(job, total, pid, server_round if job.by_round else 0)
    # Shuffled batches; each is one indexing of the tensors.
    sampler = BatchSampler(RandomSampler(train), job.batch_size, drop_last=False)
    planned = job.local_steps or job.local_epochs * len(sampler)
    parts: dict[str, Any] = {
        "model": models.build(*job.model_arguments),
        "train_data": DataLoader(train, batch_size=None, sampler=sampler),
        "eval_data": None if test is None else DataLoader(test, batch_size=1000),
        "loss_fn": LOSSES[job.data().loss],
        "share_label_counts": True,  # simulated data has no secrets
        "step_budget": job.step_budget(server_round, pid, planned),
    }
    for strategy in bare(job.methods, job.code_dir).values():
        if method in ("", strategy.method_name):
            return client_class(strategy)(**parts)
    raise ValueError(f"the server runs '{method}', which is none of the job's {job.method_names}")


app = client_app(client_fn, mods=[ContextMod(_with_method)])
