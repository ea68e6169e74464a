"""The client side: one partition's data, and a client of the method that the server runs."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.client import NumPyClient

from flwr_regs import client_app

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

    from flwr_regs.experiments.job import Job


def method_mod(message: Message, context: Context, call_next: Any) -> Message:
    """Pass the message's method and round to `client_fn`: a comparison runs several methods in one app."""
    config: dict[str, Any] = dict(message.content.config_records.get("config") or {})
    current: dict[str, str | int] = {
        "method": str(config.get("regs.method", "")),  # a query has none
        "round": int(config.get("server-round", 0)),
    }
    copy = Context(  # Flower refuses a changed run_config; the state is the node's own
        context.run_id,
        context.node_id,
        context.node_config,
        context.state,
        {**context.run_config, **current},
    )
    return call_next(message, copy)  # type: ignore[no-any-return]


@lru_cache(maxsize=8)  # five domains; keeps a client's images from message to message
def _data(job: Job, num_partitions: int, pid: int) -> tuple[TensorDataset, TensorDataset | None]:
    """Return a client's training data, and its test data if it tests."""
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    from flwr_regs.experiments import data, domains
    from flwr_regs.experiments.augment import Augmented

    dataset = data.load(job.dataset, job.data_dir, job.code_dir)
    held_out, trained = job.split(job.parts(dataset.train_y, num_partitions)[pid])

    def tensors(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if job.dataset.endswith("-domains"):
            x = domains.shifted(x, pid % len(domains.DOMAINS), job.seed + len(y))
        return torch.from_numpy(x), torch.from_numpy(y)

    mine = tensors(dataset.train_x[trained], dataset.train_y[trained])
    train = Augmented(dataset.augment, *mine) if dataset.augment else TensorDataset(*mine)
    if len(held_out):
        x = data.untouched(dataset.train_x[held_out], dataset.augment)
        return train, TensorDataset(*tensors(x, dataset.train_y[held_out]))
    if not job.tested_on_clients:
        return train, None
    # test data of the classes that this client has, and of its groups
    tested = np.isin(dataset.test_y, dataset.train_y[trained])
    if dataset.groups is not None and dataset.test_groups is not None:
        tested &= np.isin(dataset.test_groups, dataset.groups[trained])
    rows = np.flatnonzero(tested)
    if job.test_examples:
        rows = np.random.default_rng((job.seed, pid)).permutation(rows)[: job.test_examples]
    return train, TensorDataset(*tensors(dataset.test_x[rows], dataset.test_y[rows]))


def client_fn(context: Context) -> NumPyClient:
    """Build the client of ``node_config["partition-id"]``."""
    # Imported here: on a SuperNode every message starts a process that loads this file.
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    from flwr_regs.experiments import data, models
    from flwr_regs.experiments.build import bare, client_class
    from flwr_regs.experiments.job import Job
    from flwr_regs.experiments.quadratic import LOSSES

    settings = dict(context.run_config)
    method, server_round = str(settings.pop("method")), int(settings.pop("round"))
    job = Job.from_run_config(settings)
    pid = int(context.node_config["partition-id"])
    train, test = _data(job, int(context.node_config["num-partitions"]), pid)
    # Shuffled batches; each is one indexing of the tensors.
    sampler = BatchSampler(RandomSampler(train), job.batch_size, drop_last=False)
    planned = job.local_steps or job.local_epochs * len(sampler)
    parts: dict[str, Any] = {
        "model": models.build(job.dataset, job.model, job.seed, job.data_dir, job.code_dir),
        "train_data": DataLoader(train, batch_size=None, sampler=sampler),
        "eval_data": None if test is None else DataLoader(test, batch_size=1000),
        "loss_fn": LOSSES[data.load(job.dataset, job.data_dir, job.code_dir).loss],
        "share_label_counts": True,  # simulated data has no secrets
        "step_budget": job.step_budget(server_round, pid, planned),
    }
    for strategy in bare(job.methods, job.code_dir).values():
        if method in ("", strategy.method_name):
            return client_class(strategy)(**parts)
    raise ValueError(f"the server runs '{method}', which is none of the job's {job.method_names}")


app = client_app(client_fn, mods=[method_mod])
