"""Pickles of arrays, read without executing what they hold."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np


def read(path: Path) -> Any:
    """Return the arrays, lists, tuples, dicts, texts and numbers of a pickle.

    Raises ValueError if it names anything else, which would be imported and called, or if it is broken; the
    message says how to convert such a file.
    """
    try:
        with path.open("rb") as file:
            return _Arrays(file, encoding="latin1").load()
    except Exception as error:  # a broken pickle may raise anything
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        hint = "if you trust it, load it and write it as tuples or dicts of arrays with pickle.dump"
        raise ValueError(f"{path} is not a pickle of plain arrays ({why}): {hint}") from error


class _Arrays(pickle.Unpickler):
    """Knows what numpy's arrays need, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy._core", "numpy.core")
        if (module, name) not in _LEGAL:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _LEGAL[module, name]


def _bytes(text: str, encoding: str = "latin1") -> bytes:
    """Return bytes that Python 2, or protocol 2, has written as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it has bytes in the encoding {encoding}")
    return text.encode("latin1")


_LEGAL: dict[tuple[str, str], Any] = {
    # an array of protocol 5; one that the pickle fills; a number
    ("numpy.core.numeric", "_frombuffer"): lambda data, dtype, shape, order: np.frombuffer(
        data, dtype
    ).reshape(shape, order=order),
    ("numpy.core.multiarray", "_reconstruct"): lambda kind, shape, code: np.empty(0, np.uint8),
    ("numpy.core.multiarray", "scalar"): lambda dtype, data: np.frombuffer(data, dtype)[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _bytes,
}
