"""Models of linear layers, for inputs of any shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from flwr_regs.experiments.models.body import Body


def logistic(shape: Sequence[int]) -> Body:
    """Multinomial logistic regression: the output layer alone."""
    return Body([nn.Flatten()], math.prod(shape))


def mlp(shape: Sequence[int]) -> Body:
    """One hidden layer of 64; from 256 inputs on two of 200: the 2NN of McMahan et al. (2017), Sec. 3."""
    return _hidden(shape, [64] if math.prod(shape) < 256 else [200, 200])


def mlp_64(shape: Sequence[int]) -> Body:
    """One hidden layer of 64, whatever the inputs are."""
    return _hidden(shape, [64])


def _hidden(shape: Sequence[int], hidden: list[int]) -> Body:
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return Body(layers, widths[-1])
