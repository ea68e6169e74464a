"""The methods that a job can name, each built from the job's settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flwr_regs
from flwr_regs.flower.strategy import RegStrategy
from flwr_regs.term import Term

Settings = Any
"""A :class:`flwr_regs.experiments.job.Job`, which needs this file."""


def _fedavg(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.FedAvg, {}


def _fedprox(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.FedProx, {"mu": job.fedprox_mu}


def _fedfor(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.FedFOR, {"alpha": job.fedfor_alpha, "downlink": job.fedfor_downlink}


def _fedadc(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.FedADC, {
        "beta": job.fedadc_beta,
        "beta_local": _unless_negative(job.fedadc_beta_local),
        "beta_global": _unless_negative(job.fedadc_beta_global),
        "alpha": job.fedadc_alpha,
        "variant": job.fedadc_variant,
        "local_momentum": _unless_negative(job.fedadc_local_momentum),
        "downlink": job.fedadc_downlink,
    }


def _fedadc_heavy_ball(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.FedADC, {**_fedadc(job)[1], "variant": "heavy-ball"}


def _fedadc_plus(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    distillation = {"lam": job.fedadcplus_lam, "temperature": job.fedadcplus_temperature}
    return flwr_regs.FedADCPlus, {**_fedadc(job)[1], **distillation}


def _slowmo(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.SlowMo, {"beta": job.slowmo_beta, "alpha": job.slowmo_alpha}


def _fedopt(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    import torch

    kind = getattr(torch.optim, job.server_optimizer, None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise ValueError(
            f"setting 'server-optimizer' must name a class of torch.optim, not "
            f"'{job.server_optimizer}'"
        )
    make = partial(kind, lr=job.server_lr)  # type: ignore[call-arg]  # every subclass takes it
    return flwr_regs.FedOpt, {"server_optimizer": make, "server_lr_schedule": job.server_schedule}


def _fedavgm(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.FedAvgM, {
        "server_lr": job.server_lr,
        "momentum": job.server_momentum,
        "server_lr_schedule": job.server_schedule,
    }


def _fedadagrad(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.FedAdagrad, {
        "server_lr": job.adaptive_lr,
        "tau": job.adaptive_tau,
        "server_lr_schedule": job.server_schedule,
    }


def _fedadam(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    betas = {"beta_1": job.adaptive_beta_1, "beta_2": job.adaptive_beta_2}
    return flwr_regs.FedAdam, {**_fedadagrad(job)[1], **betas}


def _fedyogi(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.FedYogi, _fedadam(job)[1]


def _rfedavg(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    batches = job.rfedavg_delta_batches or None
    return flwr_regs.RFedAvg, {"lam": job.rfedavg_lam, "delta_batches": batches}


def _rfedavg_plus(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.RFedAvgPlus, {
        **_rfedavg(job)[1],
        "lam": job.rfedavgplus_lam,
        "noise_std": job.rfedavg_noise_std,
        "clip_norm": job.rfedavg_clip_norm or None,
        "sum_only": job.rfedavg_sum_only,
    }


def _efl(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.EFL, {
        "lam": job.efl_lam,
        "density_up": job.density_up or None,
        "density_down": job.density_down or None,
        "fisher_samples": job.fisher_samples or None,
    }


def _fedcurv(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.FedCurv, {
        "lam": job.fedcurv_lam,
        "fisher_samples": job.fisher_samples or None,
    }


def _fedbn(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.FedBN, {}


def _fedper(job: Settings) -> tuple[type[RegStrategy], dict[str, Any]]:
    return flwr_regs.FedPer, {"patterns": job.fedper_private}


def _unless_negative(value: float) -> float | None:
    return None if value < 0 else value  # run-config has no None


METHODS: dict[str, Callable[[Settings], tuple[type[RegStrategy], dict[str, Any]]]] = {
    "FedAvg": _fedavg,
    "FedProx": _fedprox,
    "FedFOR": _fedfor,
    "FedADC": _fedadc,
    "FedADC-heavy-ball": _fedadc_heavy_ball,
    "FedADCPlus": _fedadc_plus,
    "SlowMo": _slowmo,
    "FedOpt": _fedopt,
    "FedAvgM": _fedavgm,
    "FedAdagrad": _fedadagrad,
    "FedAdam": _fedadam,
    "FedYogi": _fedyogi,
    "RFedAvg": _rfedavg,
    "RFedAvgPlus": _rfedavg_plus,
    "EFL": _efl,
    "FedCurv": _fedcurv,
    "FedBN": _fedbn,
    "FedPer": _fedper,
}
"""Label -> function from a job to the strategy class and its own arguments."""

ADD_ONS: dict[str, Callable[[Settings], Term]] = {
    "SelfDistillation": lambda job: flwr_regs.SelfDistillation(
        job.fedadcplus_lam, job.fedadcplus_temperature
    ),
    "Ternary": lambda job: flwr_regs.SparseTernary(
        job.density_up or None, job.density_down or None
    ),
}
"""Label -> a term that is added to a method: ``FedADC+Ternary``."""
