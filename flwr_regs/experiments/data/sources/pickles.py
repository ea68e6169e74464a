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


class _Dtype:
    """A plain dtype. numpy's own takes the layout of its memory from the pickle, and would follow it."""

    def __init__(self, code: str, *_: Any) -> None:
        self.plain = np.dtype(code)
        if self.plain.kind not in "biufcSUO":
            raise pickle.UnpicklingError(f"it has the dtype {code!r:.40}")

    def __setstate__(self, state: Any) -> None:
        self.plain = self.plain.newbyteorder(state[1])


class _Array(np.ndarray[Any, Any]):
    """An array that the pickle fills; one of objects with objects, not with their addresses."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        if (dtype.plain.kind == "O") != isinstance(content, list):
            raise pickle.UnpicklingError("it has an array with another content than its dtype says")
        super().__setstate__((1, shape, dtype.plain, fortran, content))


_LEGAL: dict[tuple[str, str], Any] = {
    # an array of protocol 5; one that the pickle fills; a number
    ("numpy.core.numeric", "_frombuffer"): lambda data, dtype, shape, order: np.frombuffer(
        data, dtype.plain
    ).reshape(shape, order=order),
    ("numpy.core.multiarray", "_reconstruct"): lambda kind, shape, code: _Array(0, np.uint8),
    ("numpy.core.multiarray", "scalar"): lambda dtype, data: np.frombuffer(data, dtype.plain)[0],
    ("numpy", "ndarray"): "ndarray",  # named alone: called, it would take addresses for objects
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _bytes,
}
