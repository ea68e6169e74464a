"""Half precision on the wire: float32 arrays in 16 bits, for both ends.

With a strategy's `wire_dtype`, every float32 array of the record ``"arrays"`` travels rounded to nearest,
ties to even. numpy has no bfloat16, so a bfloat16 array travels as its bits, in uint16. An array of that
dtype always stands for a float32 one: no model with a `wire_dtype` has others of it. Other arrays, such as
integers and float64, and the terms' own records travel unchanged.

torch is imported only to round to bfloat16: a client's mod must not load it before `client_fn` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from flwr_regs.wire.arrays import NDArrays, ProtocolError

Widener = Callable[[np.ndarray], np.ndarray]
DTYPES = ("bfloat16", "float16")
LARGEST = {"bfloat16": "3.39e38", "float16": "65504"}
BITS = {"bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.float16)}
"""The dtypes that stand for float32 on the wire."""


def narrow(arrays: NDArrays, dtype: str | None) -> NDArrays:
    """Return the arrays as they travel: float32 ones rounded to `dtype`, in 16 bits; others unchanged.

    Raises ProtocolError naming an array with a finite value that `dtype` would make infinite. None: all
    travel as they are.
    """
    if dtype is None:
        return arrays
    out = {}
    for name, a in arrays.items():
        if a.dtype == np.float32:
            with np.errstate(over="ignore"):
                coded = _to_bfloat16(a) if dtype == "bfloat16" else np.asarray(a, np.float16)
            if not np.array_equal(np.isinf(WIDENERS[dtype](coded)), np.isinf(a)):
                largest = f"±{LARGEST[dtype]}, the largest number of {dtype} (wire_dtype)"
                raise ProtocolError(f"array '{name}' holds values beyond {largest}")
            a = coded
        out[name] = a
    return out


def widen(arrays: Mapping[str, np.ndarray], dtype: str) -> NDArrays:
    """Return the arrays of :func:`narrow` in float32 again; others unchanged."""
    return dict(Widened(arrays, dtype))


class Widened(Mapping[str, np.ndarray]):
    """The arrays of :func:`widen`, each widened when it is read."""

    def __init__(self, arrays: Mapping[str, np.ndarray], dtype: str) -> None:
        self._arrays, self._dtype = arrays, dtype

    def raw(self, name: str) -> tuple[np.ndarray, Widener]:
        """Return an array as it travelled, and what widens it, or a part of it."""
        raw = self._arrays[name]
        if raw.dtype != BITS[self._dtype]:
            return raw, np.asarray
        return raw, WIDENERS[self._dtype]

    def __getitem__(self, name: str) -> np.ndarray:
        raw, widens = self.raw(name)
        return widens(raw)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _to_bfloat16(a: np.ndarray) -> np.ndarray:
    import torch

    # a copy: an array that travelled may be read-only
    rounded = torch.tensor(a, device="cpu").to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _from_bfloat16(coded: np.ndarray) -> np.ndarray:
    bits = coded.astype(np.uint32)
    bits <<= np.uint32(16)  # its upper half
    return bits.view(np.float32)


_FROM_FLOAT16 = partial(np.asarray, dtype=np.float32)
WIDENERS: dict[str, Widener] = {"bfloat16": _from_bfloat16, "float16": _FROM_FLOAT16}
