"""Residual models, for images ``(channels, height, width)``; torchvision's where it has them.

torchvision's are made for images of 224 x 224. Below 64 x 64 their first layers do not shrink the image:
the first convolution has stride 1 (and is 3 x 3 in a ResNet), and a ResNet has no pooling after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from flwr_regs.experiments.extras import needed
from flwr_regs.experiments.models.body import Body

SMALL = 64  # below this side, the first layers keep the image's size


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


def resnet8(shape: Sequence[int]) -> Body:
    """He et al.'s ResNet for CIFAR with one block in each of three stages: 8 layers."""
    return _cifar_resnet(shape, 1)


def resnet20(shape: Sequence[int]) -> Body:
    """He et al. (2016), Sec. 4.2, for CIFAR: three blocks in each stage, 0.27 million parameters."""
    return _cifar_resnet(shape, 3)


def _cifar_resnet(shape: Sequence[int], blocks: int) -> Body:
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    before = 16
    for width in (16, 32, 64):
        for _ in range(blocks):
            layers.append(Block(before, width))
            before = width
    for layer in [m for top in layers for m in top.modules()]:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return Body([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()], 64)


def resnet18_gn(shape: Sequence[int]) -> Body:
    """torchvision's ResNet-18 with GroupNorm of 32 groups in place of BatchNorm (Hsieh et al. 2020)."""
    return _resnet("resnet18", shape, partial(nn.GroupNorm, 32))


def resnet50(shape: Sequence[int]) -> Body:
    """torchvision's ResNet-50, with BatchNorm."""
    return _resnet("resnet50", shape, nn.BatchNorm2d)


def _resnet(name: str, shape: Sequence[int], norm: Any) -> Body:
    net = getattr(needed("torchvision.models", "torchvision", "this model"), name)(
        num_classes=1, norm_layer=norm
    )
    features = net.fc.in_features
    net.fc = nn.Identity()
    if min(shape[1:]) < SMALL:
        net.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    elif shape[0] != 3:
        net.conv1 = nn.Conv2d(shape[0], 64, 7, 2, padding=3, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    return Body([net], features)


def mobilenetv2_gn(shape: Sequence[int]) -> Body:
    """torchvision's MobileNetV2 with GroupNorm of 8 groups and no dropout, as in the Field Guide's code."""
    groups = partial(nn.GroupNorm, 8)
    net = needed("torchvision.models", "torchvision", "this model").mobilenet_v2(
        num_classes=1, norm_layer=groups, dropout=0.0
    )
    first = net.features[0][0]
    if shape[0] != 3 or min(shape[1:]) < SMALL:
        stride = 1 if min(shape[1:]) < SMALL else 2
        net.features[0][0] = nn.Conv2d(shape[0], first.out_channels, 3, stride, 1, bias=False)
        nn.init.kaiming_normal_(net.features[0][0].weight, mode="fan_out")
    return Body([net.features, nn.AdaptiveAvgPool2d(1), nn.Flatten()], net.last_channel)
