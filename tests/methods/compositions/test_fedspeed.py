"""FedSpeed and FedSMOO beyond the laws: without a perturbation they are FedDyn."""

from typing import Any

import pytest

import flwr_regs as fr
from flwr_regs.testing.problem import train
from tests.conftest import close

DYN: list[tuple[Any, Any, dict[str, float]]] = [
    (fr.FedSpeed, fr.FedSpeedClient, {"rho": 0.0}),
    (fr.FedSpeed, fr.FedSpeedClient, {"alpha": 0.0}),
    (fr.FedSMOO, fr.FedSMOOClient, {"rho": 0.0}),
]


@pytest.mark.parametrize("row", range(len(DYN)))
def test_without_a_perturbation_it_is_feddyn(row: int) -> None:
    strategy, client, settings = DYN[row]
    some = {"seed": 3, "fraction_train": 0.6, "min_train_nodes": 1}
    models = train(strategy(lam=0.3, **settings, **some), client)
    for ours, theirs in zip(models, train(fr.FedDyn(0.3, **some), fr.FedDynClient), strict=True):
        close(ours, theirs, 1e-12)
