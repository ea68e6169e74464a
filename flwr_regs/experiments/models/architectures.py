"""The models by name: their layers in words, their sources, the inputs that they take, their size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flwr_regs.experiments.models import body, convolutional, dense, recurrent, residual


@dataclass(frozen=True)
class Net:
    """A kind of model: what makes its body, the inputs that it takes, and where it comes from.

    `make` gets the shape of an input; or with `words`, how many integers there are. `smallest` is the least
    side of an image, 0 where the input is no image. `example` and `classes` are those of the table's count.
    """

    make: Callable[..., body.Body]
    meaning: str
    source: str
    smallest: int = 0
    words: bool = False
    example: tuple[int, ...] = (3, 32, 32)
    classes: int = 10


MNIST, COLOUR, LARGE = (1, 28, 28), (3, 28, 28), (3, 224, 224)
NETS = {
    "logistic": Net(dense.logistic, "multinomial logistic regression", "–", example=MNIST),
    "mlp": Net(
        dense.mlp,
        "one hidden layer of 64; from 256 inputs on, two of 200",
        "McMahan et al. 2017, 2NN",
        example=MNIST,
    ),
    "lenet": Net(
        convolutional.lenet,
        "5 x 5 convolutions of 6 and 16, hidden layers of 120 and 84",
        "Li et al. 2022 (NIID-Bench)",
        16,
        example=MNIST,
    ),
    "cnn": Net(
        convolutional.cnn,
        "5 x 5 convolutions of 32 and 64, a hidden layer of 512; smaller below 16 x 16",
        "McMahan et al. 2017",
        8,
        example=MNIST,
    ),
    "cnn-bn": Net(
        convolutional.cnn_bn,
        "two convolutions and a hidden layer, with BatchNorm after each",
        "–",
        8,
        example=MNIST,
    ),
    "cnn-4-4": Net(
        convolutional.cnn_4_4,
        "four convolutions and four linear layers; their widths are ours",
        "Ozfatura et al. 2021 (FedADC), Sec. IV-B1",
        8,
    ),
    "resnet8": Net(
        residual.resnet8, "ResNet for CIFAR with one block a stage, BatchNorm", "He et al. 2016", 8
    ),
    "resnet20": Net(
        residual.resnet20,
        "ResNet for CIFAR with three blocks a stage, BatchNorm",
        "He et al. 2016, Sec. 4.2",
        8,
    ),
    "resnet18-gn": Net(
        residual.resnet18_gn,
        "torchvision's ResNet-18 with GroupNorm of 32 groups",
        "He et al. 2016; Hsieh et al. 2020",
        8,
        classes=100,
    ),
    "resnet50": Net(
        residual.resnet50,
        "torchvision's ResNet-50 with BatchNorm",
        "He et al. 2016",
        8,
        example=LARGE,
        classes=1000,
    ),
    "vgg9": Net(
        convolutional.vgg9,
        "six convolutions and three linear layers, dropout",
        "Wang et al. 2020 (FedMA)",
        8,
    ),
    "vgg11": Net(
        convolutional.vgg11,
        "VGG-11 of smaller widths, without BatchNorm and dropout",
        "Sattler et al. 2020; Ma et al. 2021 (EFL), Sec. 5.2",
        32,
    ),
    "alexnet": Net(
        convolutional.alexnet,
        "torchvision's AlexNet with BatchNorm in place of dropout",
        "Li et al. 2021 (FedBN)",
        63,
        example=LARGE,
    ),
    "mobilenetv2-gn": Net(
        residual.mobilenetv2_gn,
        "torchvision's MobileNetV2 with GroupNorm of 8 groups",
        "Wang et al. 2021 (Field Guide), Sec. 4.1",
        8,
        example=LARGE,
        classes=1000,
    ),
    "digits-convnet": Net(
        convolutional.digits_convnet,
        "three 5 x 5 convolutions and three linear layers, BatchNorm",
        "Li et al. 2021 (FedBN)",
        8,
        example=COLOUR,
    ),
    "char-lstm": Net(
        recurrent.char_lstm,
        "embedding of 8, two LSTM layers of 256; the last position's output",
        "McMahan et al. 2017; Caldas et al. 2018 (LEAF)",
        words=True,
        example=(80,),
        classes=80,
    ),
    "sentiment-lstm": Net(
        recurrent.sentiment_lstm,
        "embedding of 300, two LSTM layers of 256, a linear one of 256",
        "Wang et al. 2023 (rFedAvg), Sec. VI",
        words=True,
        example=(25,),
        classes=2,
    ),
}
