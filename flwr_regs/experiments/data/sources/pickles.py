"""Pickles of arrays, read without executing what they hold."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.data.sources.data_files import reading


def read(path: Path) -> Any:
    """Return the arrays, lists, tuples, dicts, texts and numbers of a pickle.

    Raises ValueError if it names anything else, which would be imported and called, or if it is broken; the
    message says how to convert such a file.
    """
    hint = "if you trust it, load it and write it as tuples or dicts of arrays with pickle.dump"
    with reading(path, f"a pickle of plain arrays: {hint}"), path.open("rb") as file:
        return _Arrays(file, encoding="latin1").load()


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
