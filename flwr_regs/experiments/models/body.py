"""The body of a model, and the head that makes the logits from its features."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Body:
    """The layers up to the output layer, and the length of a feature vector.

    The layers follow each other; their order is that in which their weights were drawn.
    """

    layers: list[nn.Module]
    features: int


def model(body: Body, classes: int, projection: int = 0) -> nn.Sequential:
    """Return a body with its output layer, and with MOON's projection head before that if `projection`.

    The head is two linear layers with a ReLU between them, from the features to as many, and to
    `projection` outputs (Li, He, Song 2021, Sec. 4.1: 256). It is the layer ``projection``; its output is
    the input of the output layer, ``classifier``. Without a head the layers have numbers.
    """
    named: OrderedDict[str, nn.Module] = OrderedDict(
        (str(i), layer) for i, layer in enumerate(body.layers)
    )
    if not projection:
        named[str(len(named))] = nn.Linear(body.features, classes)
        return nn.Sequential(named)
    named["projection"] = nn.Sequential(
        nn.Linear(body.features, body.features),
        nn.ReLU(),
        nn.Linear(body.features, projection),
    )
    named["classifier"] = nn.Linear(projection, classes)
    return nn.Sequential(named)
