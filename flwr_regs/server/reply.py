"""A client's reply to a train message, as the server uses it once it is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flwr_regs.term import Slot

SMALL = 2**16
"""The most entries of an update that is held once it is decoded."""
MOSTLY_ZERO = 32
"""One entry of an update in so many is not zero, at most, where only these are held."""


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
        Returns `delta`, which is then empty: :attr:`open` returns the reply with it.
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


def held(
    update: Mapping[str, np.ndarray], decode: Callable[[], Mapping[str, np.ndarray]]
) -> Callable[[], Mapping[str, np.ndarray]]:
    """Return what gives a decoded update again, but does not hold a large model's memory.

    A small update is held as it is; of one that is mostly zero the other entries are. Any other is decoded
    a second time.
    """
    if sum(a.size for a in update.values()) <= SMALL:
        return lambda: update
    filled = sum(int(np.count_nonzero(a)) for a in update.values())
    if filled * MOSTLY_ZERO > sum(a.size for a in update.values()):
        return decode
    places = {n: np.flatnonzero(a).astype(np.min_scalar_type(a.size)) for n, a in update.items()}
    entries = {n: (a.shape, places[n], a.reshape(-1)[places[n]]) for n, a in update.items()}
    return lambda: {n: _dense(*of_array) for n, of_array in entries.items()}


def _dense(shape: tuple[int, ...], places: np.ndarray, values: np.ndarray) -> np.ndarray:
    array = np.zeros(shape, values.dtype)
    array.reshape(-1)[places] = values
    return array
