"""A client's reply to a train message, as the server uses it once it is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flwr_regs.term import Slot


@dataclass(frozen=True)
class Reply:
    """One client's usable reply.

    Attributes
    ----------
    arrays : mapping
        ``v_k`` by name; an array that is neither here nor in `delta` equals that of ``w_t``.
    uploads : Slot
        The terms' uploads by term name; those of a term that folds are decoded when they are read.
    metrics : mapping
    num_examples : float
        ``n_k``.
    delta : mapping
        ``v_k − w_t`` of the arrays that were sent as differences.
    steps : tuple or None
        ``s_k`` and E, the local steps taken and planned; None if the client does not report them.
    buffers : frozenset of str
        The arrays that it does not train.
    tied : mapping
        Tied weights, other name -> trained name.
    frozen : str
        The digest of the frozen parameters that only the clients hold; "" if it says none.
    coded : callable, optional
        Decodes `delta`, which is then empty: :attr:`open` returns the reply with it.
    turns : int
        How many trainings of the client it is the mean of.
    """

    arrays: Mapping[str, np.ndarray]
    uploads: Slot
    metrics: Any
    num_examples: float
    delta: Mapping[str, np.ndarray] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    buffers: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)
    frozen: str = ""
    coded: Callable[[], Mapping[str, np.ndarray]] | None = None
    turns: int = 1

    @property
    def open(self) -> Reply:
        """The reply with its update decoded, which takes a model's memory as long as it is held."""
        return self if self.coded is None else replace(self, delta=self.coded(), coded=None)
