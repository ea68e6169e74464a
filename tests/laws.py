"""The methods under test: every law of test_laws.py runs for each of these cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import flwr_regs as fr
from flwr_regs.term import Term
from tests.oracles.distillation import fedadc_plus
from tests.oracles.efl import efl
from tests.oracles.fedadc import fedadc
from tests.oracles.fedavg import fedavg
from tests.oracles.fedfor import fedfor
from tests.oracles.fedopt import fedopt
from tests.oracles.fedprox import fedprox
from tests.oracles.rfedavg import rfedavg, rfedavg_plus
from tests.oracles.slowmo import slowmo


@dataclass(frozen=True)
class Exempt:
    """Why a law does not hold for a method; `refusal` is what the method says if it does not even run.

    The law's test checks it: the method is refused with this sentence, or runs and breaks the law.
    """

    why: str
    refusal: str | None = None

    def __post_init__(self) -> None:
        if len(self.why.split()) < 4:
            raise ValueError(f"a sentence that says why, not {self.why!r}")


@dataclass(frozen=True)
class Case:
    """One method with non-neutral hyper-parameters, its neutral ones, terms and oracle.

    Every law runs for every case. `unstacked` and `elsewhere` exempt it from one, with the reason: that
    it runs under vmap, and that two quadratic clients settle at FedAvg's fixed point. `settling` are
    settings with which it gets there in 120 rounds.
    """

    name: str
    strategy: Callable[..., Any]
    client: Callable[..., Any]
    settings: dict[str, Any]
    neutral: dict[str, Any]
    terms: Sequence[Term]
    oracle: Callable[..., list[dict[str, Any]]]
    oracle_settings: dict[str, Any]
    neutral_is_exact: bool = True
    unstacked: Exempt | None = None
    elsewhere: Exempt | None = None
    settling: dict[str, Any] = field(default_factory=dict)


NO_CLASSES = Exempt("It distils class probabilities.", "label counts need integer class labels")
NO_FEATURES = Exempt(
    "It compares what enters the output layer.", "no nn.Linear to use as its output"
)
OTHER_CLIENTS = Exempt(
    "The pull towards the other clients stays; methods/test_efl.py has the point."
)
TORCHS_MOMENTUM = Exempt("Its second momentum is torch's optimiser, which keeps state in place.")


def adc(name: str, **settings: Any) -> Case:
    """A FedADC case."""
    full = {"beta_local": 0.7, "beta_global": 0.7, "variant": "nesterov", "alpha": 1.0, **settings}
    betas = {k: full.pop(k) for k in ("beta_local", "beta_global")}
    downlink = full.pop("downlink", "model")
    return Case(
        name,
        fr.FedADC,
        fr.FedADCClient,
        {**betas, **full, "downlink": downlink},
        {"beta": 0.0, "downlink": downlink},
        [fr.EmbeddedMomentum(**betas, **full)],
        fedadc,
        {**betas, **full},
        neutral_is_exact=False,
        unstacked=TORCHS_MOMENTUM if "local_momentum" in settings else None,
    )


def adaptive(name: str, strategy: Any, client: Any, **settings: Any) -> Case:
    """A case of Reddi et al.'s Alg. 2."""
    rule = name.removeprefix("Fed").lower()
    full = {"server_lr": 0.02, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.01, **settings}
    if rule == "adagrad":
        del full["beta_2"]
    term = fr.AdaptiveServer(
        rule, full["server_lr"], full["beta_1"], full.get("beta_2", 0.0), full["tau"]
    )
    oracle = {k.replace("_1", "1").replace("_2", "2"): v for k, v in full.items()}
    return Case(
        name,
        strategy,
        client,
        full,
        # the adaptivity gone: Δ · η/(√v + τ) with η = τ, both beyond any √v
        {"server_lr": 1e9, "tau": 1e9, "beta_1": 0.0, "initial_v": 0.0},
        [term],
        fedopt,
        {**oracle, "server": rule, "second_moment": "mean"},
        neutral_is_exact=False,
        settling={"server_lr": 1.0, "tau": 1.0, "beta_1": 0.5},
    )


def elastic(name: str, strategy: Any, client: Any, lam: float, **densities: float) -> Case:
    """A case of the elastic term, with or without compression."""
    terms: list[Term] = [fr.Elastic(lam)]
    if strategy is fr.EFL:
        terms.append(fr.SparseTernary(**densities))
    return Case(
        name,
        strategy,
        client,
        {"lam": lam, **densities},
        {"lam": 0.0},
        terms,
        efl,
        {"lam": lam, **densities, "float32_fisher": True},
        elsewhere=OTHER_CLIENTS if lam else None,
    )


def server_sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Heavy-ball SGD as ServerOpt."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.6)


PLUS = {"lam": 0.4, "temperature": 2.0}
CASES = [
    Case("FedAvg", fr.FedAvg, fr.FedAvgClient, {}, {}, [], fedavg, {}),
    Case(
        "FedProx",
        fr.FedProx,
        fr.FedProxClient,
        {"mu": 0.7},
        {"mu": 0.0},
        [fr.Proximal(0.7)],
        fedprox,
        {"mu": 0.7},
    ),
    Case(
        "FedFOR-model",
        fr.FedFOR,
        fr.FedFORClient,
        {"alpha": 0.6},
        {"alpha": 0.0},
        [fr.FirstOrder(0.6)],
        fedfor,
        {"alpha": 0.6},
    ),
    Case(
        "FedFOR-delta",
        fr.FedFOR,
        fr.FedFORClient,
        {"alpha": 0.6, "downlink": "delta"},
        {"alpha": 0.0, "downlink": "delta"},
        [fr.FirstOrder(0.6)],
        fedfor,
        {"alpha": 0.6},
    ),
    adc("FedADC-nesterov"),
    adc("FedADC-heavy-ball", variant="heavy-ball", alpha=0.8),
    adc("FedADC-unequal-betas", beta_local=0.4, beta_global=0.8),
    adc("FedADC-unequal-heavy-ball", beta_local=0.8, beta_global=0.5, variant="heavy-ball"),
    adc("FedADC-delta", downlink="delta", beta_local=0.4),
    adc("FedADC-double-momentum", local_momentum=0.6),
    Case(
        "FedADCPlus",
        fr.FedADCPlus,
        fr.FedADCPlusClient,
        {"beta": 0.7, **PLUS},
        {"beta": 0.0, "lam": 0.0},
        [fr.SelfDistillation(**PLUS), fr.EmbeddedMomentum(0.7, 0.7)],
        fedadc_plus,
        {"beta_local": 0.7, "beta_global": 0.7, **PLUS},
        neutral_is_exact=False,
        elsewhere=NO_CLASSES,
    ),
    Case(
        "SlowMo",
        fr.SlowMo,
        fr.SlowMoClient,
        {"beta": 0.6, "alpha": 0.9},
        {"beta": 0.0},
        [fr.SlowMomentum(0.6, 0.9)],
        slowmo,
        {"beta": 0.6, "alpha": 0.9},
        neutral_is_exact=False,
    ),
    Case(
        "FedOpt",
        fr.FedOpt,
        fr.FedOptClient,
        {"server_optimizer": server_sgd},
        {"server_optimizer": lambda p: torch.optim.SGD(p, lr=1.0)},
        [fr.TorchServerOptimizer(server_sgd)],
        fedopt,
        {"server": "momentum", "server_lr": 0.7, "momentum": 0.6},
        neutral_is_exact=False,
    ),
    Case(
        "FedAvgM",
        fr.FedAvgM,
        fr.FedAvgMClient,
        {"server_lr": 0.7, "momentum": 0.6},
        {"momentum": 0.0},
        [fr.TorchServerOptimizer(server_sgd)],
        fedopt,
        {"server": "momentum", "server_lr": 0.7, "momentum": 0.6},
        neutral_is_exact=False,
    ),
    Case(
        "RFedAvg",
        fr.RFedAvg,
        fr.RFedAvgClient,
        {"lam": 0.5},
        {"lam": 0.0},
        [fr.FeatureTable(0.5)],
        rfedavg,
        {"lam": 0.5},
        elsewhere=NO_FEATURES,
    ),
    Case(
        "RFedAvgPlus",
        fr.RFedAvgPlus,
        fr.RFedAvgPlusClient,
        {"lam": 0.5},
        {"lam": 0.0},
        [fr.LeaveOneOutMean(0.5)],
        rfedavg_plus,
        {"lam": 0.5},
        elsewhere=NO_FEATURES,
    ),
    Case(
        "RFedAvgPlus-sum",
        fr.RFedAvgPlus,
        fr.RFedAvgPlusClient,
        {"lam": 0.5, "sum_only": True},
        {"lam": 0.0, "sum_only": True},
        [fr.LeaveOneOutMean(0.5, sum_only=True)],
        rfedavg_plus,
        {"lam": 0.5},
        elsewhere=NO_FEATURES,
    ),
    elastic("FedCurv", fr.FedCurv, fr.FedCurvClient, lam=0.5),
    elastic("EFL", fr.EFL, fr.EFLClient, lam=0.5, density_up=0.3, density_down=0.4),
    elastic("EFL-up", fr.EFL, fr.EFLClient, lam=0.0, density_up=0.2),
    elastic("EFL-down", fr.EFL, fr.EFLClient, lam=0.3, density_down=0.2),
    elastic("EFL-signs", fr.EFL, fr.EFLClient, lam=0.0, density_up=1.0, density_down=1.0),
    adaptive("FedAdagrad", fr.FedAdagrad, fr.FedAdagradClient),
    adaptive("FedAdam", fr.FedAdam, fr.FedAdamClient),
    adaptive("FedYogi", fr.FedYogi, fr.FedYogiClient),
]
