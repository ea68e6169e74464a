"""What training pictures go through, batch by batch, as augment.toml lists it.

All draws are torch's own, and a client's round seeds torch: the same seed, client and round give the same
pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_regs.experiments.extras import needed, table_beside

Steps = Mapping[str, Mapping[str, Any]]
"""Name of a transform -> its arguments."""


@dataclass(frozen=True)
class Augmentation:
    """One way to change pictures, float32 ``(n, channels, height, width)``; see augment.toml."""

    meaning: str
    training: Steps = field(default_factory=dict)
    testing: Steps = field(default_factory=dict)
    standardised: bool = False

    def train(self, x: Tensor) -> Tensor:
        """Return a training batch, changed at random."""
        change = composed(self.training, [*x.shape[2:]])
        return self._standardised(torch.stack([*map(change, x)]))

    def test(self, x: Tensor) -> Tensor:
        """Return other pictures, changed without draws."""
        return self._standardised(composed(self.testing, [*x.shape[2:]])(x))

    def _standardised(self, x: Tensor) -> Tensor:
        return by_picture(x) if self.standardised else x


def composed(steps: Steps, size: list[int]) -> nn.Sequential:
    """Return torchvision's transforms, one after another, for pictures of this size."""
    transforms = []
    for name, arguments in steps.items():
        v2 = needed("torchvision.transforms.v2", "torchvision", "an augmentation")
        given = {key: size if of == "size" else of for key, of in arguments.items()}
        transforms.append(getattr(v2, name)(**given))
    return nn.Sequential(*transforms)


def by_picture(x: Tensor) -> Tensor:
    """Return each picture with its own mean and deviation taken out, as TensorFlow does."""
    deviation, mean = torch.std_mean(x, dim=(1, 2, 3), correction=0, keepdim=True)
    return (x - mean) / deviation.clamp_min(x[0].numel() ** -0.5)


AUGMENTATIONS = {name: Augmentation(**row) for name, row in table_beside(__file__).items()}
"""Name -> augmentation."""


class Augmented(TensorDataset):
    """Inputs and labels; a batch of rows, taken as one index, goes through an augmentation."""

    def __init__(self, augment: str, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self._change = AUGMENTATIONS[augment].train

    def __getitem__(self, rows: list[int]) -> tuple[Tensor, ...]:
        x, *others = (tensor[rows] for tensor in self.tensors)
        return (self._change(x), *others)
