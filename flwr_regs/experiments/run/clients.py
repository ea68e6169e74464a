"""The client side: one client's examples as tensors, and a client of the method that the server runs."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from flwr_regs import client_app
from flwr_regs.experiments.data.augment import Augmented
from flwr_regs.experiments.data.datasets import untouched
from flwr_regs.experiments.data.losses import LOSSES
from flwr_regs.experiments.experiment import Experiment, Run
from flwr_regs.experiments.models import models
from flwr_regs.experiments.partition import shifts
from flwr_regs.experiments.partition.client_data import ClientData, client_data_of
from flwr_regs.flower.app import MessageContext
from flwr_regs.flower.client import RegClient, client_class

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from flwr_regs import RegStrategy

MOST_KEPT = 2**30
"""The bytes of a data set up to which a process also keeps each client's examples."""
Examples = tuple[TensorDataset, TensorDataset | None]
"""What a client trains on, and what it tests on if it tests."""


class ClientFactory:
    """Makes the clients of one run, from the run and the clients' data by value.

    Parameters
    ----------
    run : Run
    clients : ClientData

    Attributes
    ----------
    told : callable or None
        Called with the type and the round of each message, before its client begins.
    """

    def __init__(self, run: Run, clients: ClientData) -> None:
        self.run, self.clients = run, clients
        self.told: Callable[[str, int], None] | None = None
        self._kept: dict[int, Examples] = {}
        self._drawn: nn.Module | None = None

    def app(self, once: bool = False) -> ClientApp:
        """Return the app of these clients; `once`: each is made once, if it is the same in each round."""
        settings = self.run.settings
        changing = self.clients.by_round or settings.straggler_share or settings.drop_out
        return client_app(self, once=once and not changing)

    def __call__(self, context: MessageContext) -> NumPyClient:
        """Return the client of ``node_config["partition-id"]``."""
        settings, clients = self.run.settings, self.clients
        pid = int(context.node_config["partition-id"])
        server_round = int(context.config.get("server-round", 0))  # a query has none
        if self.told is not None:
            self.told(context.message_type, server_round)
        train, test = self.examples(pid, server_round)
        # Shuffled batches; each is one indexing of the tensors.
        sampler = BatchSampler(RandomSampler(train), settings.batch_size, drop_last=False)
        planned = settings.local_steps or settings.local_epochs * len(sampler)
        return self._class(
            model=self.new_model(),
            train_data=DataLoader(train, batch_size=None, sampler=sampler),
            eval_data=None if test is None else DataLoader(test, batch_size=1000),
            loss_fn=LOSSES[clients.data.loss],
            share_label_counts=True,  # simulated data has no secrets
            step_budget=clients.step_budget(server_round, pid, planned),
        )

    @cached_property
    def _class(self) -> type[RegClient]:
        return client_class(self.run.strategy())

    def examples(self, pid: int, server_round: int = 0) -> Examples:
        """Return a client's training data in a round, and its test data if it tests."""
        anew = self.clients.by_round or self.clients.data.train_x.nbytes > MOST_KEPT
        kept = {} if anew else self._kept
        if pid not in kept:
            kept[pid] = self._made(pid, server_round)
        return kept[pid]

    def _made(self, pid: int, server_round: int) -> Examples:
        settings, clients, data = self.run.settings, self.clients, self.clients.data
        held_out, trained = clients.split(clients.rows(pid, server_round))

        def tensors(x: Any, y: Any, part: int) -> tuple[torch.Tensor, torch.Tensor]:
            if settings.dataset.endswith("-domains"):
                x = shifts.in_domain(x, pid % len(shifts.DOMAINS), settings.seed + len(y))
            if settings.partition == "noise":
                level, seed = settings.noise_level, settings.seed
                x = shifts.noisy(x, pid, clients.num_clients, level, seed, part)
            return torch.from_numpy(x), torch.from_numpy(clients.labels(y, server_round))

        examples = tensors(data.train_x[trained], data.train_y[trained], 0)
        train = Augmented(data.augment, *examples) if data.augment else TensorDataset(*examples)
        if len(held_out):
            x, y = untouched(data.train_x[held_out], data.augment), data.train_y[held_out]
        elif settings.test_on_clients:
            rows = clients.test_rows(pid)
            x, y = data.test_x[rows], data.test_y[rows]
        else:
            return train, None
        return train, TensorDataset(*tensors(x, y, 1))

    def train(self, strategy: RegStrategy, grid: Grid, **how: Any) -> None:
        """Train the clients on a grid from the initial model, as the settings say; `how` is the rest."""
        settings, arrays = self.run.settings, ArrayRecord(self.new_model().state_dict())
        how["train_config"] = ConfigRecord(settings.train_config)
        how["evaluate_config"] = ConfigRecord(settings.evaluate_config)
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=settings.rounds, **how)

    def new_model(self) -> nn.Module:
        """Return a new model; the server's weights replace its own.

        One of the package's is a copy: to draw a large model's weights takes longer than its first steps. A
        user's own may not be one that can be copied.
        """
        settings = self.run.settings
        if ":" in settings.model:
            return models.build(*settings.model_arguments)
        self._drawn = self._drawn or models.build(*settings.model_arguments)
        return deepcopy(self._drawn)


def client_of(runs: tuple[Run, ...], context: MessageContext) -> NumPyClient:
    """Return the client of ``node_config["partition-id"]``, of the method that the message is for.

    The `runs` share their data; what their clients need is made once in a process. Of another method, it
    is a client of the first run, which refuses the message.
    """
    factories = _factories(runs, int(context.node_config["num-partitions"]))
    first = next(iter(factories.values()))
    return factories.get(str(context.config.get("regs.method", "")), first)(context)


@lru_cache(maxsize=2)
def _factories(runs: tuple[Run, ...], num_clients: int) -> dict[str, ClientFactory]:
    """Return method -> the factory of its clients."""
    shared = client_data_of(runs[0].settings, num_clients)
    return {run.strategy().method_name: ClientFactory(run, shared) for run in runs}


@lru_cache(maxsize=2)
def _runs_of(config: tuple[tuple[str, Any], ...]) -> tuple[Run, ...]:
    experiment = Experiment.of_methods(dict(config)).fair()
    return tuple(experiment.tests(experiment.panel))


def client_fn(context: MessageContext) -> NumPyClient:
    """Return a client of ``flwr run``, whose run config says what is compared."""
    return client_of(_runs_of(tuple(context.run_config.items())), context)


app = client_app(client_fn, once=False)
