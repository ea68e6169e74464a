"""What training pictures go through, batch by batch, and what test pictures do instead.

All draws are torch's own, and a client's round seeds torch: the same seed, client and round give the same
pictures. Constants have their source beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

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
    test: Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def flipped(x: Tensor) -> Tensor:
    """Return each picture as it is, or from right to left, with equal chances."""
    mirror = torch.rand(len(x)) < 0.5
    return torch.where(mirror[:, None, None, None].to(x.device), x.flip(3), x)


def cropped(x: Tensor, height: int, width: int) -> Tensor:
    """Return a part of each picture, at a place drawn for each."""
    n, channels, rows, columns = x.shape
    top = torch.randint(rows - height + 1, (n, 1)) + torch.arange(height)
    left = torch.randint(columns - width + 1, (n, 1)) + torch.arange(width)
    picture = torch.arange(n)[:, None, None, None]
    channel = torch.arange(channels)[None, :, None, None]
    return x[picture, channel, top[:, None, :, None], left[:, None, None, :]]


def middle(x: Tensor, size: int) -> Tensor:
    """Return the middle square of each picture."""
    top, left = ((edge - size) // 2 for edge in x.shape[2:])
    return x[:, :, top : top + size, left : left + size]


def by_picture(x: Tensor) -> Tensor:
    """Return each picture with its own mean and deviation taken out, as TensorFlow does."""
    flat = x.flatten(1)
    count = flat.shape[1]
    deviation = flat.std(dim=1, correction=0).clamp_min(1 / math.sqrt(count))
    return ((flat - flat.mean(dim=1, keepdim=True)) / deviation[:, None]).reshape(x.shape)


def rotated(x: Tensor) -> Tensor:
    """Return each picture rotated by up to 30 degrees; corners are zero."""
    angle = (2 * torch.rand(len(x)) - 1) * math.radians(DEGREES)
    cos, sin, ratio = angle.cos(), angle.sin(), x.shape[2] / x.shape[3]
    zero = torch.zeros_like(angle)  # the rows are in pixels, not in halves of the sides
    rows = (cos, -sin * ratio, zero), (sin / ratio, cos, zero)
    return _warped(x, *rows, mode="nearest")


def cut(x: Tensor) -> Tensor:
    """Return a part of each picture, of a random area and ratio, scaled back to the picture's size."""
    n = len(x)
    area = torch.empty(n).uniform_(*AREA)
    ratio = torch.empty(n).uniform_(math.log(RATIO[0]), math.log(RATIO[1])).exp()
    width, height = ((area * r).sqrt().clamp_max(1) for r in (ratio, 1 / ratio))
    across, down = ((2 * torch.rand(n) - 1) * (1 - part) for part in (width, height))
    zero = torch.zeros(n)
    return _warped(x, (width, zero, across), (zero, height, down), padding_mode="border")


def _warped(x: Tensor, first: Sequence[Tensor], second: Sequence[Tensor], **how: str) -> Tensor:
    """Return each picture under its affine map, of these two rows."""
    maps = torch.stack([torch.stack([*row], dim=1) for row in (first, second)], dim=1)
    grid = F.affine_grid(maps, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid.to(x), align_corners=False, **how)


AUGMENTATIONS = {
    "": Augmentation("none", _same, _same),
    "crop-flip": Augmentation(
        "4 pixels of zeros around, a random part of the old size, flipped or not",
        lambda x: flipped(cropped(F.pad(x, (PADDING,) * 4), *x.shape[2:])),
        _same,
    ),
    "crop-24": Augmentation(
        "a random part of 24 x 24, flipped or not, standardised by itself; tests: the middle",
        lambda x: by_picture(flipped(cropped(x, CROP, CROP))),
        lambda x: by_picture(middle(x, CROP)),
    ),
    "flip-rotate": Augmentation(
        "flipped or not, then rotated by up to 30 degrees",
        lambda x: rotated(flipped(x)),
        _same,
    ),
    "cut-flip": Augmentation(
        "a random part of at least 5 % of the area, scaled to the old size, flipped or not",
        lambda x: flipped(cut(x)),
        _same,
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
