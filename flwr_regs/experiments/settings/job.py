"""The job's settings: ``[tool.flwr.app.config]`` and ``--run-config``, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flwr_regs
from flwr_regs.abilities import FineTunes, Personalises, Withholds
from flwr_regs.experiments.extras import install_command
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.settings.build import bare, build, named
from flwr_regs.experiments.settings.calls import parse_methods
from flwr_regs.experiments.settings.settings import Settings, checked, key
from flwr_regs.flower.strategy import RegStrategy
from flwr_regs.wire.config import check_train_config

if TYPE_CHECKING:
    from flwr.app import ArrayRecord


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

    @property
    def model_arguments(self) -> tuple[str, str, int, str, str, int]:
        """The arguments of :func:`flwr_regs.experiments.models.models.build`."""
        source = self.dataset, self.model, self.seed, self.data_dir, self.code_dir
        return (*source, self.projection)

    @property
    def evaluate_config(self) -> dict[str, Any]:
        """The ``evaluate_config`` of every round."""
        if not self.personalise:
            return {}
        return {"personalise": self.personalise, "personal-lr": self.personal_lr}

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
        clients = client_data_of(self)
        assert clients.parts  # raises for a partition that is impossible
        if self.tested_on_clients:
            clients.test_rows(0)

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


def _start(dataset: str, model: str, *more: Any) -> ArrayRecord:
    """Return the initial model, after a check; one of the package's is drawn once for many methods."""
    known = ":" not in dataset + model and not dataset.startswith("image-folder")
    return (_known_start if known else _known_start.__wrapped__)(dataset, model, *more)


@lru_cache(maxsize=2)
def _known_start(*arguments: Any) -> ArrayRecord:
    from flwr.app import ArrayRecord

    from flwr_regs.experiments.models import models

    return ArrayRecord(models.check(*arguments).state_dict())
