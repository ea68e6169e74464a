"""The model and the loss of the data set ``quadratics``: a point, and its distance from optima."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Quadratic(nn.Module):
    """A point x in `dimension` dimensions, 0 at first; of rows (a, b) it returns a · x - b, ``(n, 1)``."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(dimension))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows[:, :-1] @ self.x - rows[:, -1])[:, None]


def half_square(output: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of half the squared outputs; the labels have no meaning."""
    return output.square().mean() / 2


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "": nn.functional.cross_entropy,
    "half-square": half_square,
}
"""The loss of a data set by its name."""
