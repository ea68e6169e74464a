"""Models of convolutions and hidden layers, for images ``(channels, height, width)``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import nn

from flwr_regs.experiments.models.body import Body

POOL = "pool"


def cnn(shape: Sequence[int]) -> Body:
    """McMahan et al. (2017), Sec. 3: 5 x 5 convolutions of 32 and 64 with pooling, a hidden layer of 512.

    1,663,370 parameters on MNIST, as the paper counts. Below 16 x 16 a smaller one: 3 x 3, 16 and 32, 128.
    """
    first, second, kernel, hidden = (32, 64, 5, 512) if min(shape[1:]) >= 16 else (16, 32, 3, 128)
    layers = _convolutions(shape[0], [first, POOL, second, POOL], kernel)
    features = second * _area(shape, 4)
    return Body([*layers, nn.Flatten(), nn.Linear(features, hidden), nn.ReLU()], hidden)


def cnn_bn(shape: Sequence[int]) -> Body:
    """Two 3 x 3 convolutions (16, 32) with pooling, and a hidden layer of 128, all with BatchNorm."""
    layers: list[nn.Module] = []
    for before, after in ((shape[0], 16), (16, 32)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    layers += [nn.Flatten(), nn.Linear(32 * _area(shape, 4), 128, bias=False)]
    return Body([*layers, nn.BatchNorm1d(128), nn.ReLU()], 128)


def lenet(shape: Sequence[int]) -> Body:
    """NIID-Bench's CNN (Li et al. 2022): 5 x 5 convolutions of 6 and 16, hidden layers of 120 and 84.

    LeNet-5 (LeCun et al. 1998) with ReLU and max pooling; the convolutions are not padded.
    """
    layers = _convolutions(shape[0], [6, POOL, 16, POOL], 5, padding=0)
    sides = [((side - 4) // 2 - 4) // 2 for side in shape[1:]]
    return Body([*layers, nn.Flatten(), *_hidden(16 * math.prod(sides), [120, 84])], 84)


def cnn_4_4(shape: Sequence[int]) -> Body:
    """FedADC's (Ozfatura et al. 2021, Sec. IV-B1): four convolutions and four linear layers, max pooling.

    No normalisation. The paper does not give the widths; these are 32, 32, 64 and 64 (3 x 3), then 512, 256
    and 128.
    """
    layers = _convolutions(shape[0], [32, 32, POOL, 64, 64, POOL], 3)
    hidden = _hidden(64 * _area(shape, 4), [512, 256, 128])
    return Body([*layers, nn.Flatten(), *hidden], 128)


def vgg9(shape: Sequence[int]) -> Body:
    """FedMA's VGG-9 (Wang et al. 2020), which NIID-Bench takes: six convolutions, three linear layers.

    3 x 3 convolutions of 32, 64, 128, 128, 256 and 256, pooling after every second, hidden layers of 512.
    Dropout of 0.05 on channels after the second pooling, of 0.1 before the first and the last linear layer.
    """
    layers = _convolutions(shape[0], [32, 64, POOL, 128, 128, POOL], 3)
    layers += [nn.Dropout2d(0.05), *_convolutions(128, [256, 256, POOL], 3)]
    hidden = _hidden(256 * _area(shape, 8), [512, 512])
    return Body([*layers, nn.Flatten(), nn.Dropout(0.1), *hidden, nn.Dropout(0.1)], 512)


def vgg11(shape: Sequence[int]) -> Body:
    """EFL's "simplified version" of VGG-11 (Ma et al. 2021, Sec. 5.2).

    The paper does not say what is simplified. Sattler et al. (2020), whose words it repeats, take smaller
    widths and leave out BatchNorm and dropout: 865,482 parameters on CIFAR-10. So does this: 3 x 3
    convolutions of 32, 64, and 128 six times, hidden layers of 128 and 128. Larger images than 32 x 32 are
    averaged to one pixel at the end.
    """
    plan: list[int | str] = [32, POOL, 64, POOL, 128, 128, POOL, 128, 128, POOL, 128, 128, POOL]
    layers = [*_convolutions(shape[0], plan, 3), nn.AdaptiveAvgPool2d(1)]
    return Body([*layers, nn.Flatten(), *_hidden(128, [128, 128])], 128)


def alexnet(shape: Sequence[int]) -> Body:
    """FedBN's AlexNet (Li et al. 2021): torchvision's layers with BatchNorm after each, no dropout."""
    layers: list[nn.Module] = []
    sizes = ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
    before = shape[0]
    for i, (width, kernel, stride, padding) in enumerate(sizes):
        layers += [nn.Conv2d(before, width, kernel, stride, padding), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(), *([nn.MaxPool2d(3, 2)] if i in (0, 1, 4) else [])]
        before = width
    layers += [nn.AdaptiveAvgPool2d(6), nn.Flatten()]
    return Body([*layers, *_normalised(256 * 36, [4096, 4096])], 4096)


def digits_convnet(shape: Sequence[int]) -> Body:
    """FedBN's six layers for digits (Li et al. 2021), all but the last with BatchNorm.

    5 x 5 convolutions of 64, 64 and 128, pooling after the first two, hidden layers of 2048 and 512.
    """
    layers: list[nn.Module] = []
    before = shape[0]
    for i, width in enumerate((64, 64, 128)):
        layers += [nn.Conv2d(before, width, 5, padding=2), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if i < 2 else []
        before = width
    hidden = _normalised(128 * _area(shape, 4), [2048, 512])
    return Body([*layers, nn.Flatten(), *hidden], 512)


def _convolutions(
    channels: int, plan: Iterable[int | str], kernel: int, padding: int | None = None
) -> list[nn.Module]:
    """Return convolutions of these widths, each with a ReLU; `POOL` stands for a 2 x 2 max pooling.

    They are padded so that they keep the sides, unless `padding` says otherwise.
    """
    layers: list[nn.Module] = []
    for step in plan:
        if isinstance(step, int):
            padded = kernel // 2 if padding is None else padding
            layers += [nn.Conv2d(channels, step, kernel, padding=padded), nn.ReLU()]
            channels = step
        else:
            layers.append(nn.MaxPool2d(2))
    return layers


def _hidden(inputs: int, widths: Iterable[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return layers


def _normalised(inputs: int, widths: Iterable[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()]
        inputs = width
    return layers


def _area(shape: Sequence[int], shrunk: int) -> int:
    """Return the pixels that are left when poolings have divided both sides by `shrunk`."""
    return math.prod(side // shrunk for side in shape[1:])
