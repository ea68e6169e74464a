"""The client side: one partition's data, and a client of the method that the server runs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.client import NumPyClient

from flwr_regs import RegStrategy, client_app
from flwr_regs.experiments.partition.client_data import ClientData, client_data_of
from flwr_regs.flower.mods import ContextMod

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import TensorDataset

    from flwr_regs.experiments.experiment import Run
    from flwr_regs.experiments.settings import Settings


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


MOST_KEPT = 2**28
"""The bytes of clients' examples that a process keeps beside the data set: MNIST's, for one."""


class _Kept:
    """Clients' examples of one job and round, as far as they fit: each client asks for its own again.

    What does not fit is made anew. It never takes the place of what is there, since all clients have their
    turn before the first one comes again.
    """

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._kept: dict[int, tuple[TensorDataset, TensorDataset | None]] = {}
        self._bytes = 0

    def __call__(
        self, job: Settings, num_partitions: int, pid: int, server_round: int = 0
    ) -> tuple[TensorDataset, TensorDataset | None]:
        """Return a client's training data in a round, and its test data if it tests."""
        clients = client_data_of(job, num_partitions)
        of = job, clients, server_round
        if of != self._of:
            self._of, self._kept, self._bytes = of, {}, 0
        if pid in self._kept:
            return self._kept[pid]
        made = _made(job, clients, pid, server_round)
        size = sum(t.nbytes for part in made if part is not None for t in part.tensors)
        if self._bytes + size <= MOST_KEPT:
            self._kept[pid] = made
            self._bytes += size
        return made


_data = _Kept()


def _made(
    job: Settings, clients: ClientData, pid: int, server_round: int
) -> tuple[TensorDataset, TensorDataset | None]:
    import torch
    from torch.utils.data import TensorDataset

    from flwr_regs.experiments.data import datasets as data
    from flwr_regs.experiments.data import domains
    from flwr_regs.experiments.data.augment import Augmented
    from flwr_regs.experiments.partition import shifts

    dataset = clients.data
    held_out, trained = clients.split(clients.rows(pid, server_round))

    def tensors(x: Any, y: Any, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        if job.dataset.endswith("-domains"):
            x = domains.shifted(x, pid % len(domains.DOMAINS), job.seed + len(y))
        if job.partition == "noise":
            x = shifts.noisy(x, pid, clients.num_clients, job.noise_level, job.seed, part)
        y = clients.labels(y, server_round)
        return torch.from_numpy(x), torch.from_numpy(y)

    examples = tensors(dataset.train_x[trained], dataset.train_y[trained], 0)
    train = Augmented(dataset.augment, *examples) if dataset.augment else TensorDataset(*examples)
    if len(held_out):
        x = data.untouched(dataset.train_x[held_out], dataset.augment)
        return train, TensorDataset(*tensors(x, dataset.train_y[held_out], 1))
    if not job.test_on_clients:
        return train, None
    rows = clients.test_rows(pid)
    return train, TensorDataset(*tensors(dataset.test_x[rows], dataset.test_y[rows], 1))


def _model(job: Settings) -> nn.Module:
    """Return a new model; the server's weights replace its own.

    One of the package's is a copy: to draw a large model's weights takes longer than its first steps. A
    user's own may not be one that can be copied.
    """
    from flwr_regs.experiments.models import models

    return models.build(*job.model_arguments) if ":" in job.model else deepcopy(_drawn(job))


@lru_cache(maxsize=1)
def _drawn(job: Settings) -> nn.Module:
    from flwr_regs.experiments.models import models

    return models.build(*job.model_arguments)


@lru_cache(maxsize=2)
def _runs(config: tuple[tuple[str, Any], ...]) -> list[tuple[Run, RegStrategy]]:
    """Return the runs of a run config, each with its strategy, without the settings."""
    from flwr_regs.experiments.experiment import Experiment
    from flwr_regs.experiments.strategies import check_apart

    experiment = Experiment.of_methods(dict(config)).fair()
    runs = experiment.tests(*experiment.panels)
    return list(zip(runs, check_apart(runs), strict=True))


def client_fn(context: Context) -> NumPyClient:
    """Build the client of ``node_config["partition-id"]``."""
    # Imported here: on a SuperNode every message starts a process that loads this file.
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    from flwr_regs.experiments.data.losses import LOSSES
    from flwr_regs.experiments.strategies import client_class

    config = dict(context.run_config)
    method, server_round = str(config.pop("method")), int(config.pop("round"))
    runs = _runs(tuple(config.items()))
    job = replace(runs[0][0].settings, methods="")  # they share the data
    pid = int(context.node_config["partition-id"])
    total = int(context.node_config["num-partitions"])
    clients = client_data_of(job, total)
    train, test = _data(job, total, pid, server_round if clients.by_round else 0)
    # Shuffled batches; each is one indexing of the tensors.
    sampler = BatchSampler(RandomSampler(train), job.batch_size, drop_last=False)
    planned = job.local_steps or job.local_epochs * len(sampler)
    parts: dict[str, Any] = {
        "model": _model(job),
        "train_data": DataLoader(train, batch_size=None, sampler=sampler),
        "eval_data": None if test is None else DataLoader(test, batch_size=1000),
        "loss_fn": LOSSES[clients.data.loss],
        "share_label_counts": True,  # simulated data has no secrets
        "step_budget": clients.step_budget(server_round, pid, planned),
    }
    for _, strategy in runs:
        if method in ("", strategy.method_name):
            return client_class(strategy)(**parts)
    raise ValueError(
        f"the server runs '{method}', which is none of {[run.method for run, _ in runs]}"
    )


app = client_app(client_fn, mods=[ContextMod(_with_method)])
