"""The model of the data set ``quadratics``: a point."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Quadratic(nn.Module):
    """A point x in `dimension` dimensions, 0 at first; of rows (a, b) it returns a · x - b, ``(n, 1)``."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(dimension))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows[:, :-1] @ self.x - rows[:, -1])[:, None]
