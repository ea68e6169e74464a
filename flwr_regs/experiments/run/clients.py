"""The client side: the clients of a run as data, and a client of the method that the server runs."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from math import ceil
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from flwr_regs import Clients, RegStrategy, client_app
from flwr_regs.client.train.batches import Batches
from flwr_regs.experiments.data.augment import Augmented
from flwr_regs.experiments.data.losses import LOSSES
from flwr_regs.experiments.experiment import Experiment, Run
from flwr_regs.experiments.models import models
from flwr_regs.experiments.partition import shifts
from flwr_regs.experiments.partition.client_data import ClientData, client_data_of
from flwr_regs.flower.app import MessageContext
from flwr_regs.flower.client import RegClient, client_class

MOST_KEPT = 2**30
"""The bytes of a data set up to which a process also keeps each client's examples."""
Examples = tuple[TensorDataset, TensorDataset | None]
"""What a client trains on, and what it tests on if it tests."""


class RunClients(Clients):
    """The clients of one run, from the run and the clients' data by value.

    Parameters
    ----------
    run : Run
    data : ClientData

    Attributes
    ----------
    told : callable or None
        Called with the round when a client begins.
    """

    def __init__(self, run: Run, data: ClientData) -> None:
        self.run, self.data, settings = run, data, run.settings
        self.told: Callable[[int], None] | None = None
        self.by_round = data.by_round or data.data.train_x.nbytes > MOST_KEPT
        self._drawn: nn.Module | None = None
        tests = settings.personalise or settings.test_on_clients
        super().__init__(
            self.new_model,
            train_sets=self.sets_of,  # which also returns the test sets
            test_sets=self.sets_of if tests else None,
            batch_size=settings.batch_size,
            loss_fn=LOSSES[data.data.loss],
            num_clients=settings.num_clients,
        )

    def sets_of(self, pid: int, server_round: int = 0) -> tuple[Batches, Batches | None]:
        """Return a client's (training data, test data) in a round as batches, each of them one indexing."""
        train, test = self.examples(pid, server_round)
        sampler = BatchSampler(RandomSampler(train), self.batch_size, drop_last=False)
        tests = None if test is None else DataLoader(test, batch_size=1000)
        return DataLoader(train, batch_size=None, sampler=sampler), tests

    def step_budget(self, pid: int, server_round: int) -> int | None:
        """Return the most local steps of a client that begins in a round; None if there is no limit."""
        if self.told is not None:
            self.told(server_round)
        settings = self.run.settings
        if not (settings.straggler_share or settings.drop_out):  # the steps need not be counted
            return None
        return self.data.step_budget(server_round, pid, self.planned_steps(pid, server_round))

    def planned_steps(self, pid: int, server_round: int = 1) -> int:
        """Return how many local steps a client is asked for in a round."""
        settings, data = self.run.settings, self.data
        _, trained = data.split(data.rows(pid, server_round))
        batches = ceil(len(trained) / settings.batch_size)
        return int(settings.local_steps or settings.local_epochs * batches)

    def examples(self, pid: int, server_round: int = 0) -> Examples:
        """Return a client's training data in a round, and its test data if it tests."""
        settings, clients, data = self.run.settings, self.data, self.data.data
        held_out, trained = clients.split(clients.rows(pid, server_round))

        def tensors(x: Any, y: Any, part: int) -> tuple[torch.Tensor, torch.Tensor]:
            if settings.dataset.endswith("-domains"):
                x = shifts.in_domain(x, pid % len(shifts.DOMAINS), settings.seed + len(y))
            if settings.partition == "noise":
                level, seed = settings.noise_level, settings.seed
                x = shifts.noisy(x, pid, settings.num_clients, level, seed, part)
            return torch.from_numpy(x), torch.from_numpy(clients.labels(y, server_round))

        examples = tensors(data.train_x[trained], data.train_y[trained], 0)
        train = Augmented(data.augment, *examples) if data.augment else TensorDataset(*examples)
        if settings.test_on_clients and not settings.held_out_share:
            tested = data.tested(False, clients.test_rows(pid))
        elif len(held_out):
            tested = data.tested(True, held_out)
        else:
            return train, None
        return train, TensorDataset(*tensors(*tested, 1))

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

    def start(self, strategy: RegStrategy, grid: Grid, **how: Any) -> None:
        """Train on a grid from the initial model, as the settings say; `how` is the rest."""
        settings, arrays = self.run.settings, ArrayRecord(self.new_model().state_dict())
        how["train_config"] = ConfigRecord(settings.train_config)
        how["evaluate_config"] = ConfigRecord(settings.evaluate_config)
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=settings.rounds, **how)


def client_of(runs: tuple[Run, ...], context: MessageContext) -> RegClient:
    """Return the client of ``node_config["partition-id"]``, of the method that the message is for.

    The `runs` share their data; what their clients need is made once in a process. Of another method, it
    is a client of the first run, which refuses the message.
    """
    clients, kinds = _shared(runs)
    first = next(iter(kinds.values()))
    return clients.made(kinds.get(str(context.config.get("regs.method", "")), first), context)


@lru_cache(maxsize=2)
def _shared(runs: tuple[Run, ...]) -> tuple[RunClients, dict[str, type[RegClient]]]:
    """Return the clients, and method -> its kind of client."""
    kinds = {made.method_name: client_class(made) for made in map(Run.strategy, runs)}
    return RunClients(runs[0], client_data_of(runs[0].settings)), kinds


@lru_cache(maxsize=2)
def _runs_of(config: tuple[tuple[str, Any], ...]) -> tuple[Run, ...]:
    experiment = Experiment.of_methods(dict(config)).fair()
    return tuple(experiment.tests(experiment.panel))


def client_fn(context: MessageContext) -> RegClient:
    """Return a client of ``flwr run``: its run config says what is compared, its node how many clients."""
    config = {**context.run_config, "num-clients": int(context.node_config["num-partitions"])}
    return client_of(_runs_of(tuple(config.items())), context)


app = client_app(client_fn, once=False)
