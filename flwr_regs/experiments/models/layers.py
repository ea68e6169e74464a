"""The layers of the package's models: a function is a model of architectures.toml, or makes some of them.

It takes what the data says, a shape or a vocabulary, and returns a `Body`: the layers up to the output
layer, and how many features they make. Weights are drawn from torch's random state.

torchvision's models are made for images of 224 x 224. Below 64 x 64 their first layers do not shrink the
image: the first convolution has stride 1 (and is 3 x 3 in a ResNet), and a ResNet has no pooling after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from flwr_regs.experiments.extras import needed

Shape = Sequence[int]
SMALL = 64  # below this side, the first layers keep the image's size


Body = tuple[list[nn.Module], int]
"""The layers up to the output layer, in the order in which their weights were drawn; their features."""


def model(body: Body, classes: int, projection: int = 0) -> nn.Sequential:
    """Return a body with its output layer, and with MOON's projection head before that if `projection`.

    The head is two linear layers with a ReLU between them, from the features to as many, and to
    `projection` outputs (Li, He, Song 2021, Sec. 4.1: 256). It is the layer ``projection``; its output is
    the input of the output layer, ``classifier``. Without a head the layers have numbers.
    """
    layers, features = body
    if not projection:
        return nn.Sequential(*layers, nn.Linear(features, classes))
    to_many, to_few = nn.Linear(features, features), nn.Linear(features, projection)
    net = nn.Sequential(*layers)
    net.add_module("projection", nn.Sequential(to_many, nn.ReLU(), to_few))
    net.add_module("classifier", nn.Linear(projection, classes))
    return net


def mlp(shape: Shape) -> Body:
    """One hidden layer of 64; from 256 inputs on two of 200: the 2NN of McMahan et al. (2017), Sec. 3."""
    return stacked(shape, [], [64] if math.prod(shape) < 256 else [200, 200])


def cnn(shape: Shape) -> Body:
    """McMahan et al. (2017), Sec. 3: 5 x 5 convolutions of 32 and 64 with pooling, a hidden layer of 512.

    1,663,370 parameters on MNIST, as the paper counts. Below 16 x 16 a smaller one: 3 x 3, 16 and 32, 128.
    """
    pool = ["MaxPool2d", 2]
    if min(shape[1:]) < 16:
        return stacked(shape, [16, pool, 32, pool], [128])
    return stacked(shape, [32, pool, 64, pool], [512], kernel=5)


def stacked(
    shape: Shape, plan: Any, hidden: Any, kernel: int = 3, norm: bool = False, bias: bool = True
) -> Body:
    """Return convolutions and hidden layers, each with a ReLU, with BatchNorm if `norm`.

    Where there are residual blocks, the weights of convolutions are He et al.'s.
    architectures.toml says what `plan` and `hidden` may hold.
    """
    layers: list[nn.Module] = []
    features = shape[0]

    def add(layer: nn.Module, normalised: nn.Module) -> None:
        layers.extend([layer, normalised, nn.ReLU()] if norm else [layer, nn.ReLU()])

    for step in plan:
        width, *window = step if isinstance(step, list) else (step, kernel, 1, kernel // 2)
        if isinstance(width, str):
            layers.append((Block if width == "Block" else getattr(nn, width))(*window))
        else:
            size, stride, padding = window
            convolution = nn.Conv2d(features, width, size, stride, padding, bias=bias)
            add(convolution, nn.BatchNorm2d(width))
            features = width
    body = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():  # how many features are left; in eval mode nothing is drawn or counted
        features = body.eval()(torch.zeros(1, *shape)).shape[1]
    layers = [*body.train()]
    blocks = any(isinstance(layer, Block) for layer in layers)
    for layer in body.modules():
        if blocks and isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    for step in hidden:
        if isinstance(step, list):
            layers.append(getattr(nn, step[0])(*step[1:]))
        else:
            add(nn.Linear(features, step, bias=bias), nn.BatchNorm1d(step))
            features = step
    return layers, features


class Block(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm, and the input added to their output.

    Where the width grows, every second pixel of the input is added, with zeros for the new channels: He et
    al.'s shortcut without parameters (option A).
    """

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.grown = after - before
        stride = 2 if self.grown else 1
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.grown:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.grown // 2, self.grown // 2))
        return F.relu(out + x)


def _resnet(name: str, norm: Any, shape: Shape) -> Body:
    models = needed("torchvision.models", "torchvision", "this model")
    net = getattr(models, name)(num_classes=1, norm_layer=norm)
    features = net.fc.in_features
    net.fc = nn.Identity()
    if min(shape[1:]) < SMALL:
        net.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    elif shape[0] != 3:
        net.conv1 = nn.Conv2d(shape[0], 64, 7, 2, padding=3, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    return [net], features


resnet18_gn = partial(_resnet, "resnet18", partial(nn.GroupNorm, 32))
"""torchvision's ResNet-18 with GroupNorm of 32 groups in place of BatchNorm (Hsieh et al. 2020)."""
resnet50 = partial(_resnet, "resnet50", nn.BatchNorm2d)
"""torchvision's ResNet-50, with BatchNorm."""


def mobilenetv2_gn(shape: Shape) -> Body:
    """torchvision's MobileNetV2 with GroupNorm of 8 groups and no dropout, as in the Field Guide's code."""
    models = needed("torchvision.models", "torchvision", "this model")
    net = models.mobilenet_v2(num_classes=1, norm_layer=partial(nn.GroupNorm, 8), dropout=0.0)
    first = net.features[0][0]
    if shape[0] != 3 or min(shape[1:]) < SMALL:
        stride = 1 if min(shape[1:]) < SMALL else 2
        net.features[0][0] = nn.Conv2d(shape[0], first.out_channels, 3, stride, 1, bias=False)
        nn.init.kaiming_normal_(net.features[0][0].weight, mode="fan_out")
    return [net.features, nn.AdaptiveAvgPool2d(1), nn.Flatten()], net.last_channel


class Last(nn.Module):
    """Two LSTM layers over embedded integers; the second one's output at the last position."""

    def __init__(self, embedding: nn.Embedding, width: int = 256) -> None:
        super().__init__()
        self.embedding = embedding
        self.lstm = nn.LSTM(embedding.embedding_dim, width, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(n, width)`` from integers ``(n, length)``."""
        out: torch.Tensor = self.lstm(self.embedding(x.long()))[0][:, -1]
        return out


def char_lstm(vocabulary: int) -> Body:
    """McMahan et al. (2017), Sec. 3, as in LEAF: embedding of 8, two layers of 256, the next character.

    819,920 parameters with LEAF's 80 characters. (Keras has one bias where torch has two: 2,048 fewer.)
    """
    return [Last(nn.Embedding(vocabulary, 8))], 256


def sentiment_lstm(vocabulary: int, vectors: torch.Tensor | None = None) -> Body:
    """rFedAvg's for Sent140 (Wang et al. 2023, Sec. VI): two layers of 256 and a linear one of 256.

    The paper's word vectors are pretrained: `vectors`, float32 ``(vocabulary, length)``, which stay fixed.
    Without them, vectors of GloVe's length, 300, are trained from random ones: a departure.
    """
    embedding = nn.Embedding(vocabulary, 300)
    if vectors is not None:
        embedding = nn.Embedding.from_pretrained(vectors)  # type: ignore[no-untyped-call]
    return [Last(embedding), nn.Linear(256, 256), nn.ReLU()], 256


class Quadratic(nn.Module):
    """A point x in `dimension` dimensions, 0 at first; of rows (a, b) it returns a · x - b, ``(n, 1)``."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(dimension))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows[:, :-1] @ self.x - rows[:, -1])[:, None]
