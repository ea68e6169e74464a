"""Half precision on the wire: float32 arrays in 16 bits, for both ends.

With a strategy's `wire_dtype`, every float32 array of the record ``"arrays"`` travels rounded to nearest,
ties to even. numpy has no bfloat16, so a bfloat16 array travels as its bits, in uint16. The config's entry
``regs.halves`` marks the rounded arrays (:func:`flwr_regs.wire.arrays.mask`). Other arrays, such as
integers and float64, and the terms' own records travel unchanged.

torch is imported only to round to bfloat16: a client's mod must not load it before `client_fn` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, ProtocolError, mask, unmask

DTYPES = ("bfloat16", "float16")
LARGEST = {"bfloat16": "3.39e38", "float16": "65504"}
MAGNITUDE = np.uint16(0x7FFF)
"""All bits but the sign."""
INFINITE = {"bfloat16": np.uint16(0x7F80), "float16": np.uint16(0x7C00)}


def narrow(arrays: NDArrays, dtype: str) -> NDArrays:
    """Return the arrays as they travel: float32 ones rounded to `dtype`, in 16 bits; others unchanged.

    Raises ProtocolError naming an array with a finite value that `dtype` would make infinite.
    """
    out = {}
    for name, a in arrays.items():
        if a.dtype == np.float32:
            with np.errstate(over="ignore"):
                coded = _to_bfloat16(a) if dtype == "bfloat16" else np.asarray(a, np.float16)
            infinite = coded.view(np.uint16) & MAGNITUDE == INFINITE[dtype]
            if infinite.any() and not np.array_equal(infinite, np.isinf(a)):
                raise ProtocolError(
                    f"array '{name}' holds values beyond ±{LARGEST[dtype]}, the largest number of {dtype} "
                    "(wire_dtype)"
                )
            a = coded
        out[name] = a
    return out


def widen(arrays: NDArrays, coded: Collection[str], dtype: str) -> NDArrays:
    """Return the `coded` arrays in float32, from the 16 bits of :func:`narrow`; others unchanged.

    Raises ProtocolError naming a `coded` array that does not have 16 bits.
    """
    return dict(Widened(arrays, coded, dtype))


class Widened(Mapping[str, np.ndarray]):
    """The arrays of :func:`widen`, each widened when it is read."""

    def __init__(
        self, arrays: Mapping[str, np.ndarray], coded: Collection[str], dtype: str
    ) -> None:
        bits = np.uint16 if dtype == "bfloat16" else np.float16
        for name in coded:
            if arrays[name].dtype != bits:
                raise ProtocolError(
                    f"array '{name}' has dtype {arrays[name].dtype}, expected {np.dtype(bits)}, which "
                    f"{dtype} travels in"
                )
        self._arrays, self._coded, self._dtype = arrays, coded, dtype

    def raw(self, name: str) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """Return an array as it travelled, and what widens it, or a part of it."""
        raw = self._arrays[name]
        if name not in self._coded:
            return raw, np.asarray
        if self._dtype == "bfloat16":
            return raw, _from_bfloat16
        return raw, partial(np.asarray, dtype=np.float32)

    def outline(self) -> NDArrays:
        """Return arrays of the same shapes and dtypes, for checks: nothing is widened."""
        like = np.zeros((), np.float32)
        coded = {n: np.broadcast_to(like, self._arrays[n].shape) for n in self._coded}
        return {n: coded.get(n, a) for n, a in self._arrays.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        raw, widens = self.raw(name)
        return widens(raw)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def to_half(model: NDArrays, dtype: str | None) -> tuple[NDArrays, dict[str, Any]]:
    """Return a model as it travels, and the entries that describe it in the message's config."""
    if dtype is None:
        return model, {}
    coded = [n for n, a in model.items() if a.dtype == np.float32]
    return narrow(model, dtype), {keys.HALF_KEY: dtype, keys.HALVES_KEY: mask(coded, model)}


def from_half(arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Widened:
    """Return the arrays of :func:`to_half` in float32; raise ProtocolError without a valid mask."""
    coded = unmask(config.get(keys.HALVES_KEY), arrays)
    return Widened(arrays, coded, str(config[keys.HALF_KEY]))


def _to_bfloat16(a: np.ndarray) -> np.ndarray:
    import torch

    rounded = torch.tensor(a).to(torch.bfloat16)  # a copy: an array that travelled may be read-only
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _from_bfloat16(coded: np.ndarray) -> np.ndarray:
    bits = coded.astype(np.uint32)
    bits <<= np.uint32(16)  # its upper half
    return bits.view(np.float32)
