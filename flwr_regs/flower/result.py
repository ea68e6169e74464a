"""What `start` returns: Flower's result, and the best round's model."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result


@dataclass(frozen=True)
class Best:
    """The best round so far.

    Attributes
    ----------
    round : int
    value : float
        Of the metric, or what the function returned.
    arrays : ArrayRecord
        The global model after that round.
    """

    round: int
    value: float
    arrays: ArrayRecord


@dataclass(repr=False)
class TrainingResult(Result):
    """Flower's result, and the best round's model, where `keep_best` asks for it."""

    best: Best | None = None
