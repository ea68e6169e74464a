"""The methods under test: every law of test_laws.py runs for each of these cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr_regs import (
    FedAvg,
    FedAvgClient,
    FedFOR,
    FedFORClient,
    FedProx,
    FedProxClient,
    FirstOrder,
    Proximal,
)
from flwr_regs.method import Term
from tests.oracles.fedavg import fedavg
from tests.oracles.fedfor import fedfor
from tests.oracles.fedprox import fedprox


@dataclass(frozen=True)
class Case:
    """One method with non-neutral hyper-parameters, its neutral ones, terms and oracle."""

    name: str
    strategy: Callable[..., Any]
    client: Callable[..., Any]
    settings: dict[str, Any]
    neutral: dict[str, Any]
    terms: Sequence[Term]
    oracle: Callable[..., list[dict[str, Any]]]
    oracle_settings: dict[str, Any]
    neutral_is_exact: bool = True
    common: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("FedAvg", FedAvg, FedAvgClient, {}, {}, [], fedavg, {}),
    Case(
        "FedProx",
        FedProx,
        FedProxClient,
        {"mu": 0.7},
        {"mu": 0.0},
        [Proximal(0.7)],
        fedprox,
        {"mu": 0.7},
    ),
    Case(
        "FedFOR-model",
        FedFOR,
        FedFORClient,
        {"alpha": 0.6},
        {"alpha": 0.0},
        [FirstOrder(0.6)],
        fedfor,
        {"alpha": 0.6},
    ),
    Case(
        "FedFOR-delta",
        FedFOR,
        FedFORClient,
        {"alpha": 0.6, "downlink": "delta"},
        {"alpha": 0.0, "downlink": "delta"},
        [FirstOrder(0.6)],
        fedfor,
        {"alpha": 0.6},
    ),
]
