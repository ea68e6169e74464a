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
            losses, sizes = zip(*self._unread, strict=True)
            terms = np.empty(len(sizes) + 1, np.float32)
            terms[0], terms[1:] = self._total, sizes
            with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges
                terms[1:] *= torch.stack(losses).reshape(-1).float().cpu().numpy()
                self._total = np.add.accumulate(terms)[-1]  # one after the other
            self._unread.clear()
        return float(self._total)
