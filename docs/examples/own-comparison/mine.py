"""Data, a model and a method of your own, compared with the package's methods. In this folder:

flwr-regs run dataset=mine.py:load model=mine.py:Net methods="FedAvg, FedAvg+mine.py:Clip(norm=1.0)" lr=0.2
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from sklearn.datasets import make_classification
from torch import nn

from flwr_regs import Term


def load():
    """Return (train_x, train_y, test_x, test_y): 20 numbers for each example, labels 0 to 4."""
    x, y = make_classification(
        2000, n_features=20, n_informative=8, n_classes=5, n_clusters_per_class=1, random_state=1
    )
    return x[:1600], y[:1600], x[1600:], y[1600:]


class Net(nn.Module):
    """A perceptron. It is called without arguments; its weights come from the run's seed."""

    def __init__(self):
        super().__init__()
        self.hidden, self.classes = nn.Linear(20, 32), nn.Linear(32, 5)

    def forward(self, x):
        return self.classes(torch.relu(self.hidden(x)))


@dataclass(frozen=True)
class Clip(Term):
    """Scales a step's gradient down to a norm, if it is longer."""

    name: ClassVar[str] = "clip"
    norm: float = 1.0  # travels to the clients with each round

    def correct(self, grads, params, ctx):
        length = torch.sqrt(sum((g**2).sum() for g in grads.values()))
        scale = (self.norm / (length + 1e-12)).clamp(max=1.0)
        return {name: scale * g for name, g in grads.items()}
