"""Half precision on the wire: float32 arrays in 16 bits, for both ends.

With a strategy's `wire_dtype` every float32 array of the record ``"arrays"`` travels rounded to nearest,
ties to even. numpy has no bfloat16: such an array travels as its bits, in uint16; a float16 one as itself.
Which arrays are so coded a mask in the config says (``regs.halves``; :func:`flwr_regs.flower.wire.mask`).
All others, integers and float64 among them, and the terms' own records travel as they are.

torch is imported only to round to bfloat16: a client's mod may not load it before `client_fn` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord

from flwr_regs.flower import wire

if TYPE_CHECKING:
    from torch import nn

DTYPES = ("bfloat16", "float16")
LARGEST = {"bfloat16": "3.39e38", "float16": "65504"}


def narrow(arrays: wire.NDArrays, dtype: str) -> wire.NDArrays:
    """Return the arrays as they travel: float32 ones rounded to `dtype`, in 16 bits each; others as is.

    Raises ProtocolError naming an array with a finite value that `dtype` would make infinite.
    """
    out = {}
    for name, a in arrays.items():
        if a.dtype == np.float32:
            coded = _to_bfloat16(a) if dtype == "bfloat16" else _to_float16(a)
            if not np.array_equal(np.isinf(_widened(coded, dtype)), np.isinf(a)):
                raise wire.ProtocolError(
                    f"array '{name}' holds values beyond ±{LARGEST[dtype]}, the largest of {dtype}, in "
                    "which it should travel (wire_dtype)"
                )
            a = coded
        out[name] = a
    return out


def widen(arrays: wire.NDArrays, coded: Collection[str], dtype: str) -> wire.NDArrays:
    """Return the float32 arrays whose 16 bits :func:`narrow` made, and the others as they are.

    Raises ProtocolError naming a `coded` array that does not have 16 bits.
    """
    bits = np.uint16 if dtype == "bfloat16" else np.float16
    for name in coded:
        if arrays[name].dtype != bits:
            raise wire.ProtocolError(
                f"array '{name}' has dtype {arrays[name].dtype}, expected {np.dtype(bits)}, as which "
                f"{dtype} travels"
            )
    return {n: _widened(a, dtype) if n in coded else a for n, a in arrays.items()}


def pack_record(model: wire.NDArrays, dtype: str | None) -> tuple[ArrayRecord, dict[str, Any]]:
    """Return a model as it travels, and what the message's config must say of it."""
    if dtype is None:
        return wire.to_record(model), {}
    coded = [n for n, a in model.items() if a.dtype == np.float32]
    told = {wire.HALF_KEY: dtype, wire.HALVES_KEY: wire.mask(coded, model)}
    return wire.to_record(narrow(model, dtype)), told


def unpack_record(record: ArrayRecord, config: Mapping[str, Any]) -> wire.NDArrays:
    """Return the arrays that :func:`pack_record` packed; raise ProtocolError without a proper mask."""
    arrays = wire.from_record(record)
    coded = wire.unmask(config.get(wire.HALVES_KEY), arrays)  # type: ignore[arg-type]
    return widen(arrays, coded, str(config[wire.HALF_KEY]))


def float32_arrays(model: nn.Module) -> ArrayRecord:
    """Return a model's ``state_dict`` for `initial_arrays`, with bfloat16 and float16 entries in float32.

    The values are the same and the model stays as it is, where ``model.float()`` would change it. For
    strategies with a `wire_dtype`, whose server keeps the model in float32.
    """
    halves = ("torch.bfloat16", "torch.float16")
    state = {n: v.detach().cpu() for n, v in model.state_dict().items()}
    return ArrayRecord(
        {n: Array((v.float() if str(v.dtype) in halves else v).numpy()) for n, v in state.items()}
    )


def _to_bfloat16(a: np.ndarray) -> np.ndarray:
    import torch

    rounded = torch.tensor(a).to(torch.bfloat16)  # a copy: an array that travelled may be read-only
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _to_float16(a: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(a, dtype=np.float16)


def _widened(coded: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float16":
        return coded.astype(np.float32)
    return np.asarray(coded.astype(np.uint32) << 16).view(np.float32)  # its upper half
