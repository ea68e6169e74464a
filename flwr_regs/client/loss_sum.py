"""The loss of a client's steps, summed without making an accelerator wait. Plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class LossSum:
    """The sum of the steps' losses, each times its number of examples, in float32 and in order.

    It reads the losses many at a time: a read in each step would make an accelerator wait.
    """

    def __init__(self) -> None:
        self._total = np.float32(0)
        self._unread: list[tuple[Tensor, int]] = []

    def add(self, loss: Tensor, examples: int) -> None:
        """Add the mean loss of a batch."""
        self._unread.append((loss.detach(), examples))
        if len(self._unread) == 512:
            self.total()

    def total(self) -> float:
        """Return the sum so far."""
        if self._unread:
            losses = torch.stack([loss for loss, _ in self._unread]).float().tolist()
            with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges
                for loss, (_, examples) in zip(losses, self._unread, strict=True):
                    self._total += np.float32(loss) * np.float32(examples)
            self._unread.clear()
        return float(self._total)
