"""Models of convolutions and hidden layers, for images ``(channels, height, width)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from flwr_regs.experiments.models.body import Body

POOL = "pool"
Plan = Sequence[int | str | tuple[int, int, int, int] | nn.Module]
"""Layers in order: the width of a convolution, or its width, kernel, stride and padding; `POOL`, a 2 x 2
max pooling; or a module."""


def cnn(shape: Sequence[int]) -> Body:
    """McMahan et al. (2017), Sec. 3: 5 x 5 convolutions of 32 and 64 with pooling, a hidden layer of 512.

    1,663,370 parameters on MNIST, as the paper counts. Below 16 x 16 a smaller one: 3 x 3, 16 and 32, 128.
    """
    if min(shape[1:]) < 16:
        return _stacked(shape, [16, POOL, 32, POOL], [128])
    return _stacked(shape, [32, POOL, 64, POOL], [512], kernel=5)


def cnn_bn(shape: Sequence[int]) -> Body:
    """Two 3 x 3 convolutions (16, 32) with pooling, and a hidden layer of 128, all with BatchNorm."""
    return _stacked(shape, [16, POOL, 32, POOL], [128], norm=True, bias=False)


def lenet(shape: Sequence[int]) -> Body:
    """NIID-Bench's CNN (Li et al. 2022): 5 x 5 convolutions of 6 and 16, hidden layers of 120 and 84.

    LeNet-5 (LeCun et al. 1998) with ReLU and max pooling; the convolutions are not padded.
    """
    return _stacked(shape, [(6, 5, 1, 0), POOL, (16, 5, 1, 0), POOL], [120, 84])


def cnn_4_4(shape: Sequence[int]) -> Body:
    """FedADC's (Ozfatura et al. 2021, Sec. IV-B1): four convolutions and four linear layers, max pooling.

    No normalisation. The paper does not give the widths; these are 32, 32, 64 and 64 (3 x 3), then 512, 256
    and 128.
    """
    return _stacked(shape, [32, 32, POOL, 64, 64, POOL], [512, 256, 128])


def vgg9(shape: Sequence[int]) -> Body:
    """FedMA's VGG-9 (Wang et al. 2020), which NIID-Bench takes: six convolutions, three linear layers.

    3 x 3 convolutions of 32, 64, 128, 128, 256 and 256, pooling after every second, hidden layers of 512.
    Dropout of 0.05 on channels after the second pooling, of 0.1 before the first and the last linear layer.
    """
    plan: Plan = [32, 64, POOL, 128, 128, POOL, nn.Dropout2d(0.05), 256, 256, POOL]
    return _stacked(shape, plan, [nn.Dropout(0.1), 512, 512, nn.Dropout(0.1)])


def vgg11(shape: Sequence[int]) -> Body:
    """EFL's "simplified version" of VGG-11 (Ma et al. 2021, Sec. 5.2).

    The paper does not say what is simplified. Sattler et al. (2020), whose words it repeats, take smaller
    widths and leave out BatchNorm and dropout: 865,482 parameters on CIFAR-10. So does this: 3 x 3
    convolutions of 32, 64, and 128 six times, hidden layers of 128 and 128. Larger images than 32 x 32 are
    averaged to one pixel at the end.
    """
    twice: Plan = [128, 128, POOL]
    plan: Plan = [32, POOL, 64, POOL, *twice, *twice, *twice, nn.AdaptiveAvgPool2d(1)]
    return _stacked(shape, plan, [128, 128])


def alexnet(shape: Sequence[int]) -> Body:
    """FedBN's AlexNet (Li et al. 2021): torchvision's layers with BatchNorm after each, no dropout."""
    first: Plan = [(64, 11, 4, 2), nn.MaxPool2d(3, 2), (192, 5, 1, 2), nn.MaxPool2d(3, 2)]
    last: Plan = [384, 256, 256, nn.MaxPool2d(3, 2), nn.AdaptiveAvgPool2d(6)]
    return _stacked(shape, [*first, *last], [4096, 4096], norm=True)


def digits_convnet(shape: Sequence[int]) -> Body:
    """FedBN's six layers for digits (Li et al. 2021), all but the last with BatchNorm.

    5 x 5 convolutions of 64, 64 and 128, pooling after the first two, hidden layers of 2048 and 512.
    """
    return _stacked(shape, [64, POOL, 64, POOL, 128], [2048, 512], kernel=5, norm=True)


def _stacked(
    shape: Sequence[int],
    plan: Plan,
    hidden: Iterable[int | nn.Module],
    kernel: int = 3,
    norm: bool = False,
    bias: bool = True,
) -> Body:
    """Return convolutions and hidden layers of these widths, each with a ReLU, with BatchNorm if `norm`.

    Convolutions whose width alone is given are padded so that they keep the sides.
    """
    layers: list[nn.Module] = []
    features = shape[0]

    def add(layer: nn.Module, normalised: nn.Module) -> None:
        layers.extend([layer, normalised, nn.ReLU()] if norm else [layer, nn.ReLU()])

    for step in plan:
        if isinstance(step, nn.Module):
            layers.append(step)
        elif isinstance(step, str):
            layers.append(nn.MaxPool2d(2))
        else:
            whole = step if isinstance(step, tuple) else (step, kernel, 1, kernel // 2)
            width, size, stride, padding = whole
            convolution = nn.Conv2d(features, width, size, stride, padding, bias=bias)
            add(convolution, nn.BatchNorm2d(width))
            features = width
    layers.append(nn.Flatten())
    with torch.no_grad():  # how many features are left; in eval mode nothing is drawn or counted
        features = nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape[1]
    nn.Sequential(*layers).train()
    for layer in hidden:
        if isinstance(layer, nn.Module):
            layers.append(layer)
        else:
            add(nn.Linear(features, layer, bias=bias), nn.BatchNorm1d(layer))
            features = layer
    return Body(layers, features)
