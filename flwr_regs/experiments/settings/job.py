"""The job's settings: ``[tool.flwr.app.config]`` and ``--run-config``, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import flwr_regs
from flwr_regs.abilities import FineTunes, Personalises, Withholds
from flwr_regs.experiments.data.datasets import Data, load
from flwr_regs.experiments.extras import install_command
from flwr_regs.experiments.partition import shifts
from flwr_regs.experiments.partition.group_splits import test_split
from flwr_regs.experiments.partition.partitions import BY_GROUP, BY_ROUND, partition, partition_hash
from flwr_regs.experiments.settings.build import bare, build, named
from flwr_regs.experiments.settings.calls import parse_methods
from flwr_regs.experiments.settings.settings import Settings, checked, key
from flwr_regs.flower.strategy import RegStrategy
from flwr_regs.wire.config import check_train_config

if TYPE_CHECKING:
    from flwr.app import ArrayRecord

PARTITION_SETTINGS = (
    *("seed", "shards_per_client", "classes_per_client", "dirichlet_alpha", "similarity"),
    *("pachinko_alpha", "pachinko_beta", "quantity_alpha", "interpolation", "sample_share"),
    "long_tail",
)
"""The settings that a partition takes beside its kind and the number of clients."""


@dataclass(frozen=True)
class Job(Settings):
    """One comparison: its checked settings, and what follows from them."""

    @classmethod
    def from_run_config(cls, config: Mapping[str, Any]) -> Job:
        """Return the checked settings; those that `config` leaves out have their defaults.

        Raises
        ------
        ValueError
            A key that does not exist or has a value of the wrong kind or range; the message names the
            key, the value and what was expected.
        ValueError, TypeError
            A method that cannot be built; the message starts with the part of `methods`.
        """
        job = cls(**checked(config))
        check_train_config(job.train_config, "the run config")
        assert job.strategies  # raises for a method that cannot be built
        if (job.held_out_clients or job.personalise) and job.tested_on_clients:
            raise ValueError(
                "held-out-clients and personalise do not go with domains or private entries, nor "
                "with test-on-clients: there, the clients test the model"
            )
        if job.partition == "long-tail-rounds" and job.held_out_clients:
            raise ValueError(
                "held-out-clients does not go with partition=long-tail-rounds, where every client draws "
                "from all examples: use held-out-share"
            )
        if job.data_dir and not Path(job.data_dir).expanduser().is_dir():
            raise ValueError(f"setting 'data-dir': there is no folder '{job.data_dir}'")
        if job.out and not Path(job.out).is_absolute():
            raise ValueError(
                f"setting 'out' must be an absolute path, not '{job.out}': Flower runs the server "
                "in another folder"
            )
        return job

    @classmethod
    def checked(cls, config: Mapping[str, Any]) -> Job:
        """Do :meth:`from_run_config`, and check each method with its model; ValueError for all of it."""
        try:
            job = cls.from_run_config(config)
            job.check()
        except TypeError as error:  # an argument of a method
            raise ValueError(str(error)) from error
        return job

    @property
    def config(self) -> dict[str, Any]:
        """The settings by name, as a run config has them."""
        return {key(f.name): getattr(self, f.name) for f in fields(self)}

    @property
    def strategies(self) -> Mapping[str, RegStrategy]:
        """Label -> strategy of each method, without the job's settings."""
        return bare(self.methods, self.code_dir)

    @property
    def method_names(self) -> list[str]:
        """The labels of the methods to compare, in order, without repeats."""
        return list(self.strategies)

    @property
    def tested_on_clients(self) -> bool:
        """Whether the clients test the model: as told, or each has private entries or its own domain.

        Otherwise the server tests it, without private entries or domains.
        """
        terms = [t for s in self.strategies.values() for t in s.term.terms]
        private = any(isinstance(t, Withholds | Personalises | FineTunes) for t in terms)
        return private or self.test_on_clients or self.dataset.endswith("-domains")

    @property
    def train_config(self) -> dict[str, Any]:
        """The ``train_config`` of every round."""
        given = {
            "lr": self.lr,
            "local-steps": self.local_steps,
            "local-epochs": 0 if self.local_steps else self.local_epochs,
            "optimizer": "" if self.optimizer == "SGD" else self.optimizer,
            "momentum": self.momentum,
            "weight-decay": self.weight_decay,
            "clip-norm": self.clip_norm,
        }
        return {name: value for name, value in given.items() if value}  # zero is off

    def data(self) -> Data:
        """Return the data set, or what `examples`, `num-classes` and `synthetic` leave or make of it.

        Raises ImportError, OSError or ValueError as :func:`flwr_regs.experiments.data.datasets.load` does.
        """
        groups = self.num_clients + self.held_out_clients if self.examples else 0
        source = self.dataset, self.data_dir, self.code_dir
        return _data(*source, self.synthetic, self.examples, self.num_classes, groups)

    @property
    def model_arguments(self) -> tuple[str, str, int, str, str, int]:
        """The arguments of :func:`flwr_regs.experiments.models.models.build`."""
        source = self.dataset, self.model, self.seed, self.data_dir, self.code_dir
        return (*source, self.projection)

    def parts_of(self, data: Data, num_clients: int) -> list[np.ndarray]:
        """Return the examples of each training client, then of each held-out one."""
        return _parts(self, data, num_clients)

    def partition_hash(self) -> str:
        """Return the hash of the split: equal ones have the same examples on the same clients."""
        return partition_hash(self.parts_of(self.data(), self.num_clients)[: self.num_clients])

    @property
    def by_round(self) -> bool:
        """Whether a client's data changes from round to round."""
        return self.partition in BY_ROUND

    def rows(self, data: Data, num_clients: int, pid: int, server_round: int) -> np.ndarray:
        """Return a client's training examples in a round, those that it holds out among them."""
        if self.partition != "long-tail-rounds":
            return self.parts_of(data, num_clients)[pid]
        drawn = data.train_y, pid, server_round, self.seed
        rows = shifts.long_tail(*drawn, share=self.sample_share, ratio=self.long_tail)
        if not self.examples_per_client:
            return rows
        return np.random.default_rng(self.seed).permutation(rows)[: self.examples_per_client]

    def labels(self, y: np.ndarray, num_classes: int, server_round: int) -> np.ndarray:
        """Return the labels that examples have in a round."""
        if self.partition != "label-swaps-rounds":
            return y
        classes = shifts.swapped(num_classes, server_round, self.seed, self.swap_probability)
        return np.asarray(classes[y], y.dtype)

    def test_rows(self, data: Data, num_clients: int, pid: int) -> np.ndarray:
        """Return the test examples of a client that tests the model."""
        by_group = self.partition in BY_GROUP and data.groups is not None
        if self.test_split == "classes" and not (by_group and data.test_groups is not None):
            own = data.train_y[self.parts_of(data, num_clients)[pid]]
            return np.flatnonzero(np.isin(data.test_y, own))
        return _test_parts(self, data, num_clients)[pid]

    def label_counts(self) -> np.ndarray:
        """Return how many examples of each class each training client has: (clients, classes), int64."""
        data = self.data()
        parts = self.parts_of(data, self.num_clients)[: self.num_clients]
        return np.stack([np.bincount(data.train_y[p], minlength=data.num_classes) for p in parts])

    @property
    def evaluate_config(self) -> dict[str, Any]:
        """The ``evaluate_config`` of every round."""
        if not self.personalise:
            return {}
        return {"personalise": self.personalise, "personal-lr": self.personal_lr}

    def split(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a client's examples as (held out, trained on)."""
        share = 0.2 if self.personalise else self.held_out_share
        if share == 0:
            return rows[:0], rows
        if self.partition == "long-tail-rounds":
            out = shifts.held_out(rows, share, self.seed)
            return rows[out], rows[~out]
        shuffled = np.random.default_rng(self.seed).permutation(rows)
        count = int(len(rows) * share)
        return shuffled[:count], shuffled[count:]

    def check(self) -> None:
        """Raise ValueError if any of the methods refuses its settings, the model or the optimiser."""
        arrays = _start(*self.model_arguments)
        for method in self.method_names:
            strategy = self.strategy(method)
            with named(method):
                strategy.check_model(arrays)
                strategy.prepare(self.rounds, None, self.train_config, self.evaluate_config)

    def check_data(self) -> None:
        """Load the data set; raise ValueError if it cannot be split over `num_clients` as asked.

        Raises ImportError or OSError as :func:`flwr_regs.experiments.data.datasets.load` does.
        """
        data = self.data()
        self.parts_of(data, self.num_clients)
        if self.tested_on_clients:
            self.test_rows(data, self.num_clients, 0)

    def strategy(self, method: str) -> RegStrategy:
        """Return a new strategy of the method with this label, with the job's settings.

        What the method's calls say wins. Raises as :func:`flwr_regs.experiments.settings.build.build` does.
        """
        common: dict[str, Any] = {
            "seed": self.seed,
            "lr_schedule": lambda t: self.lr_decay ** (t - 1),
            "server_lr_schedule": lambda t: self.server_lr_decay ** (t - 1),
            "fraction_train": self.fraction_train,
            "min_train_nodes": 1,
            "min_available_nodes": 1,
            "min_evaluate_nodes": 1,
            "fraction_evaluate": 1.0 if self.personalise or self.tested_on_clients else 0.0,
            "cohorts": self.cohorts,
            "overlap": self.overlap,
            "wire_dtype": self.wire_dtype or None,
            "drop_inactive": self.drop_inactive or None,
            "restart_lr": self.restart_lr,
            "on_divergence": self.on_divergence,
        }
        if self.dp_clip_norm:
            common["privacy"] = self.privacy()
        papers = {"weighting": self.weighting, "incomplete": self.incomplete}
        common |= {name: value for name, value in papers.items() if value != "paper"}
        (calls,) = parse_methods(method).values()
        return build(calls, self.code_dir, **common)

    def privacy(self) -> flwr_regs.CentralDP:
        """Return central differential privacy with a new accountant, for one client replaced."""
        if self.dp_noise == 0:
            return flwr_regs.CentralDP(self.dp_clip_norm, 0.0)
        from flwr.serverapp import NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod

        config = PrivacyConfig(
            target_delta=self.dp_delta,
            population_size=self.num_clients,
            neighboring_relation=NeighboringRelation.REPLACE_ONE,
            sampling_method=SamplingMethod.WITHOUT_REPLACEMENT,
        )
        # Every order gives a bound; the smallest counts. The default's large ones take half a second each.
        orders = (*(1 + x / 10 for x in range(1, 20)), *range(3, 33), 40, 48, 64, 128)
        try:
            accountant = RdpAccountant(config, tuple(map(float, orders)))
        except ImportError as error:
            raise ValueError(
                f"setting 'dp-clip-norm' needs dp-accounting: {install_command('privacy')}, or "
                "dp-noise=0, which protects nobody"
            ) from error
        return flwr_regs.CentralDP(self.dp_clip_norm, self.dp_noise, accountant)

    def step_budget(self, server_round: int, pid: int, planned: int) -> int | None:
        """Return how many local steps a client can take in a round; None means all.

        The straggler model: a share of the clients is slow. Each slow client has its own speed between
        ``straggler-speed`` and 1, the fraction of its steps that it takes. Any client may drop out of a
        round and take no step. All draws depend on (seed, partition, round) alone.
        """
        if self.straggler_share == 0 and self.drop_out == 0:
            return None
        # the tag 2 separates these draws from the cohorts', from (seed, round, client)
        client = np.random.default_rng((self.seed, pid, 0, 2))
        slow = client.random() < self.straggler_share
        speed = client.uniform(self.straggler_speed, 1) if slow else 1.0
        luck = np.random.default_rng((self.seed, pid, server_round, 2)).random()
        return 0 if luck < self.drop_out else int(planned * speed)


@lru_cache(maxsize=8)  # one process serves many clients
def _parts(job: Job, data: Data, num_clients: int) -> list[np.ndarray]:
    settings: dict[str, Any] = {name: getattr(job, name) for name in PARTITION_SETTINGS}
    settings |= {"kind": job.partition, "num_clients": num_clients + job.held_out_clients}
    labels, fine_labels = data.train_y, None
    if job.partition == "pachinko":
        if data.coarse is None:
            raise ValueError(
                f"partition 'pachinko': dataset '{job.dataset}' does not say the coarse label of each "
                "example"
            )
        labels, fine_labels = data.coarse, data.train_y
    parts = partition(labels, groups=data.groups, fine_labels=fine_labels, **settings)
    if job.examples_per_client:
        rng = np.random.default_rng(job.seed)
        parts = [rng.permutation(p)[: job.examples_per_client] for p in parts]
    return parts


@lru_cache(maxsize=8)
def _test_parts(job: Job, data: Data, num_clients: int) -> list[np.ndarray]:
    train, test = data.train_y, data.test_y
    if job.partition in BY_GROUP and data.groups is not None and data.test_groups is not None:
        train, test = data.groups, data.test_groups
    return test_split(train, _parts(job, data, num_clients)[:num_clients], test, job.seed)


def _start(dataset: str, model: str, *more: Any) -> ArrayRecord:
    """Return the initial model, after a check; one of the package's is drawn once for many methods."""
    known = ":" not in dataset + model and not dataset.startswith("image-folder")
    return (_known_start if known else _known_start.__wrapped__)(dataset, model, *more)


@lru_cache(maxsize=2)
def _known_start(*arguments: Any) -> ArrayRecord:
    from flwr.app import ArrayRecord

    from flwr_regs.experiments.models import models

    return ArrayRecord(models.check(*arguments).state_dict())


@lru_cache(maxsize=2)  # a Ray actor keeps it for all its clients
def _data(
    dataset: str,
    data_dir: str,
    code_dir: str,
    synthetic: bool,
    examples: int,
    num_classes: int,
    num_groups: int,
) -> Data:
    from flwr_regs.experiments.data import subset

    data = (subset.records if synthetic else load)(dataset, data_dir, code_dir)
    if examples or num_classes:
        return subset.reduced(data, examples, num_classes, num_groups)
    return data
