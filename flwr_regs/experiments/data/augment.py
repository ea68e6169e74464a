"""What training pictures go through, batch by batch, and what test pictures do instead.

All draws are torch's own, and a client's round seeds torch: the same seed, client and round give the same
pictures. Constants have their source beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from flwr_regs.experiments.extras import needed

PADDING = 4  # He et al. (2016), Sec. 4.2: zeros around CIFAR's images, then a crop, and flips
CROP = 24  # McMahan et al. (2017), Sec. 3, as in TensorFlow's tutorial; the Field Guide's code too
DEGREES = 30.0  # Li et al. (2021), FedBN's code for Office-Caltech10 and DomainNet
# Inception's preprocessing, in the Field Guide's code for GLD
AREA, RATIO = (0.05, 1.0), (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Augmentation:
    """One way to change pictures, float32 ``(n, channels, height, width)``.

    Attributes
    ----------
    meaning : str
        One line.
    train : callable
        Of a training batch; random.
    test : callable
        Of all other pictures; not random.
    """

    meaning: str
    train: Callable[[Tensor], Tensor]
    test: Callable[[Tensor], Tensor] = lambda x: x


def by_picture(x: Tensor) -> Tensor:
    """Return each picture with its own mean and deviation taken out, as TensorFlow does."""
    deviation, mean = torch.std_mean(x, dim=(1, 2, 3), correction=0, keepdim=True)
    return (x - mean) / deviation.clamp_min(x[0].numel() ** -0.5)


def _each(x: Tensor, *names: str) -> Tensor:
    """Return each picture under torchvision's transforms of these names, drawn for it alone."""
    v2 = needed("torchvision.transforms.v2", "torchvision", "an augmentation")
    size = [*x.shape[2:]]
    known: dict[str, Callable[[], Any]] = {
        "flip": v2.RandomHorizontalFlip,
        "crop": partial(v2.RandomCrop, size, PADDING),
        "crop-24": partial(v2.RandomCrop, CROP),
        "rotate": partial(v2.RandomRotation, DEGREES),
        "cut": partial(v2.RandomResizedCrop, size, AREA, RATIO, antialias=False),
    }
    change = v2.Compose([known[name]() for name in names])
    return torch.stack([change(picture) for picture in x])


def _middle(x: Tensor) -> Tensor:
    v2 = needed("torchvision.transforms.v2.functional", "torchvision", "an augmentation")
    return by_picture(v2.center_crop(x, [CROP, CROP]))


AUGMENTATIONS = {
    "": Augmentation("none", lambda x: x),
    "crop-flip": Augmentation(
        "4 pixels of zeros around, a random part of the old size, flipped or not",
        lambda x: _each(x, "crop", "flip"),
    ),
    "crop-24": Augmentation(
        "a random part of 24 x 24, flipped or not, standardised by itself; tests: the middle",
        lambda x: by_picture(_each(x, "crop-24", "flip")),
        _middle,
    ),
    "flip-rotate": Augmentation(
        "flipped or not, then rotated by up to 30 degrees",
        lambda x: _each(x, "flip", "rotate"),
    ),
    "cut-flip": Augmentation(
        "a random part of at least 5 % of the area, scaled to the old size, flipped or not",
        lambda x: _each(x, "cut", "flip"),
    ),
}
"""Name -> augmentation."""


class Augmented(TensorDataset):
    """Inputs and labels; a batch of rows, taken as one index, goes through an augmentation."""

    def __init__(self, augment: str, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self._change = AUGMENTATIONS[augment].train

    def __getitem__(self, rows: list[int]) -> tuple[Tensor, ...]:
        x, *others = (tensor[rows] for tensor in self.tensors)
        return (self._change(x), *others)
