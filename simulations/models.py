"""The models of the comparison, one for each data set."""

from __future__ import annotations

import torch
from torch import nn


def build(dataset: str, seed: int) -> nn.Module:
    """Return the model of a data set, its weights drawn from `seed`; other random state is kept.

    ``digits``: a perceptron with one hidden layer of 64. ``mnist``: the CNN of McMahan et al. 2017,
    two 5 x 5 convolutions (32, 64) with pooling and a hidden layer of 512.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if dataset == "digits":
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        return nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )
