"""The task that implementations are driven on: five clients of unequal size, three a round."""

from __future__ import annotations

import numpy as np

from .loops.run import Task
from .model import initial

SIZES = (7, 12, 9, 17, 10)
COHORTS = ((0, 1, 2), (2, 3, 4), (0, 1, 3), (1, 2, 4), (0, 3, 4))
"""Nobody takes part in all rounds, and two begin in round 2: an error in what clients keep shows."""
ADAPTIVE = {"server_lr": 0.1, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.1}
SETTINGS = {
    "FedDyn": {"alpha": 0.5},
    "FedADC-double": {"beta": 0.6, "phi": 0.5},
    "FedLESAM": {"rho": 0.5},
    "FedCurv": {"lam": 0.5},
    "FedSAM": {"rho": 0.3},
    "FedGAMMA": {"rho": 0.3},
    "FedSpeed": {"lam": 0.5, "rho": 0.3},
    "FedSMOO": {"lam": 0.5, "rho": 0.3},
    "FedInit": {"beta": 0.3},
    "RFedAvg": {"lam": 0.5},
    "RFedAvgPlus": {"lam": 0.5},
    "MOON": {"mu": 2.0, "tau": 0.5},
    "FedGKD": {"gamma": 2.0, "models": 2, "temperature": 2.0},
    "FedLC": {"tau": 1.0},
    "FedRS": {"alpha": 0.5},
    "FedExP": {"eps": 0.02},
    "QFedAvg": {"q": 1.0},
    "FedAvgM": {"server_lr": 0.7, "momentum": 0.6},
    "FedAdagrad": {**ADAPTIVE, "beta_1": 0.0},  # Flower's has no beta_1
    "FedAdam": ADAPTIVE,
    "FedYogi": ADAPTIVE,
    "Ditto": {"lam": 0.5},
    "APFL": {"alpha": 0.5},
    "FedAMP": {"lam": 0.3, "alpha": 0.5, "sigma": 2.0},
}
"""Of each method that has settings of its own; FedProx and FedNova have mu."""


def small_task(momentum: float = 0.0, lr_decay: float = 1.0) -> Task:
    """Return the task: a perceptron 4-5-3, batches of 4, 2 epochs, learning rate 0.2, mu 0.5.

    Each client's inputs have a mean of their own and two of three classes prevail, so that clients drift.
    """
    rng, clients = np.random.default_rng(17), []
    for k, size in enumerate(SIZES):
        x = rng.normal(size=(size, 4)) + rng.normal(size=4)
        y = np.where(rng.random(size) < 0.8, (k + rng.integers(0, 2, size)) % 3, (k + 2) % 3)
        clients.append((x, y.astype(np.int64)))
    w, data = initial(4, 5, 3, 5), tuple(clients)
    return Task(w, data, COHORTS, 0.2, 2, 4, 0.5, momentum, lr_decay, SETTINGS)
