"""What training pictures go through, batch by batch, as augment.toml lists it.

All draws are torch's own, and a client's round seeds torch: the same seed, client and round give the same
pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from flwr_regs.experiments.extras import needed, table_beside


@dataclass(frozen=True)
class Augmentation:
    """One way to change pictures, float32 ``(n, channels, height, width)``; see augment.toml."""

    meaning: str
    training: Sequence[Any] = ()
    testing: Sequence[Any] = ()
    standardised: bool = False

    def train(self, x: Tensor) -> Tensor:
        """Return a training batch, changed at random."""
        return self._changed(self.training, x, lambda change: torch.stack([*map(change, x)]))

    def test(self, x: Tensor) -> Tensor:
        """Return other pictures, changed without draws."""
        return self._changed(self.testing, x, lambda change: change(x))

    def _changed(self, steps: Sequence[Any], x: Tensor, apply: Callable[[Any], Tensor]) -> Tensor:
        if not steps:
            return x
        v2 = needed("torchvision.transforms.v2", "torchvision", "an augmentation")
        transforms = []
        for name, *arguments in steps:
            named = arguments.pop() if isinstance([name, *arguments][-1], dict) else {}
            given = [[*x.shape[2:]] if one == "size" else one for one in arguments]
            transforms.append(getattr(v2, name)(*given, **named))
        changed = apply(v2.Compose(transforms))
        return by_picture(changed) if self.standardised else changed


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
