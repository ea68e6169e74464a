"""The job's settings: ``[tool.flwr.app.config]`` and ``--run-config``, checked before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.flower.strategy import RegStrategy
from simulations.data import DATASETS, PARTITIONS, partition


def _fedavg(job: Job, **common: Any) -> RegStrategy:
    from flwr_regs import FedAvg

    return FedAvg(**common)


def _fedprox(job: Job, **common: Any) -> RegStrategy:
    from flwr_regs import FedProx

    return FedProx(mu=job.fedprox_mu, **common)


def _fedfor(job: Job, **common: Any) -> RegStrategy:
    from flwr_regs import FedFOR

    return FedFOR(alpha=job.fedfor_alpha, downlink=job.fedfor_downlink, **common)


METHODS: dict[str, Callable[..., RegStrategy]] = {
    "FedAvg": _fedavg,
    "FedProx": _fedprox,
    "FedFOR": _fedfor,
}
"""Method name -> ``build(job, **what every strategy takes)``."""


def setting(
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    above: float | None = None,
) -> Any:
    """Declare a setting with its legal values."""
    return field(metadata={"low": low, "high": high, "choices": choices, "above": above})


@dataclass(frozen=True)
class Job:
    """One comparison. Field ``a_b`` is the run-config key ``a-b``; pyproject.toml says what each is."""

    methods: str = setting()
    dataset: str = setting(choices=DATASETS)
    data_dir: str = setting()
    partition: str = setting(choices=PARTITIONS)
    shards_per_client: int = setting(low=1)
    dirichlet_alpha: float = setting(above=0)
    similarity: float = setting(low=0, high=100)
    num_clients: int = setting(low=2)
    held_out_clients: int = setting(low=0)
    rounds: int = setting(low=1)
    fraction_train: float = setting(above=0, high=1)
    lr: float = setting(above=0)
    lr_decay: float = setting(above=0, high=1)
    local_epochs: int = setting(low=1)
    local_steps: int = setting(low=0)
    batch_size: int = setting(low=1)
    weighting: str = setting(choices=("num-examples", "uniform"))
    seed: int = setting(low=0)
    target_accuracy: float = setting(above=0, high=1)
    fedprox_mu: float = setting(low=0)
    fedfor_alpha: float = setting(low=0)
    fedfor_downlink: str = setting(choices=("model", "delta"))
    out: str = setting()

    @classmethod
    def from_run_config(cls, config: Mapping[str, Any]) -> Job:
        """Return the checked settings.

        Raises
        ------
        ValueError
            A key that does not exist, is missing, or has a value of the wrong kind or range; the
            message names the key, the value and what was expected.
        """
        by_key = {f.name.replace("_", "-"): f for f in fields(cls)}
        for key in config:
            if key not in by_key:
                near = difflib.get_close_matches(key, by_key, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise ValueError(f"unknown setting '{key}' (known: {', '.join(by_key)}){hint}")
        if missing := [k for k in by_key if k not in config]:
            raise ValueError(f"the run config lacks {missing}")
        values = {f.name: _checked(key, config[key], f) for key, f in by_key.items()}
        job = cls(**values)
        unknown = [m for m in job.method_names if m not in METHODS]
        if unknown or not job.method_names:
            raise ValueError(
                f"setting 'methods' must be a comma-separated list of {', '.join(METHODS)}, "
                f"not '{job.methods}'"
            )
        if job.data_dir and not Path(job.data_dir).expanduser().is_dir():
            raise ValueError(f"setting 'data-dir': there is no folder '{job.data_dir}'")
        if job.out and not Path(job.out).is_absolute():
            raise ValueError(
                f"setting 'out' must be an absolute path, not '{job.out}': Flower runs the server "
                "in a folder of its own"
            )
        return job

    @property
    def method_names(self) -> list[str]:
        """The methods to compare, in order, without repeats."""
        return list(dict.fromkeys(m.strip() for m in self.methods.split(",") if m.strip()))

    @property
    def train_config(self) -> dict[str, Any]:
        """What every client is told each round."""
        if self.local_steps:
            return {"lr": self.lr, "local-steps": self.local_steps}
        return {"lr": self.lr, "local-epochs": self.local_epochs}

    def parts(self, labels: np.ndarray, num_clients: int) -> list[np.ndarray]:
        """Return the examples of each training client, then of each held-out one."""
        return partition(
            labels,
            self.partition,
            num_clients + self.held_out_clients,
            self.seed,
            shards_per_client=self.shards_per_client,
            dirichlet_alpha=self.dirichlet_alpha,
            similarity=self.similarity,
        )

    def strategy(self, method: str, **extra: Any) -> RegStrategy:
        """Build the strategy of a method with the job's settings."""
        return METHODS[method](
            self,
            weighting=self.weighting,
            seed=self.seed,
            lr_schedule=lambda t: self.lr_decay ** (t - 1),
            fraction_train=self.fraction_train,
            min_train_nodes=1,
            min_available_nodes=1,
            fraction_evaluate=0.0,  # the server tests the global model itself
            **extra,
        )


def _checked(key: str, value: Any, f: Any) -> Any:
    kind = {"int": int, "float": float, "str": str}[f.type]
    legal: tuple[type, ...] = (int, float) if kind is float else (kind,)
    rule = f.metadata
    expected = {int: "a whole number", float: "a number", str: "text in quotes"}[kind]
    if rule["choices"]:
        expected = f"one of {', '.join(rule['choices'])}"
    if rule["above"] is not None:
        expected += f" above {rule['above']}"
    if rule["low"] is not None:
        expected += f" of at least {rule['low']}"
    if rule["high"] is not None:
        expected += f" up to {rule['high']}"
    if (
        isinstance(value, bool)
        or not isinstance(value, legal)
        or (rule["choices"] and value not in rule["choices"])
        or (rule["above"] is not None and not value > rule["above"])
        or (rule["low"] is not None and not value >= rule["low"])
        or (rule["high"] is not None and not value <= rule["high"])
    ):
        raise ValueError(f"setting '{key}' must be {expected}, not {value!r}")
    return kind(value)
