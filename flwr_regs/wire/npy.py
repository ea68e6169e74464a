r"""Arrays as they travel: the bytes of a ``.npy``. The one reader of what arrives.

``numpy.load`` also reads zip files and pickles. Here only the header goes to numpy, and its shape and dtype
must account for every byte that came, before an array is made. The array is a view of these bytes, so a
reply costs no more memory than it took to send. Numbers are booleans, integers and floats of at most 64
bits, little endian; bfloat16 travels as uint16 (precision.py). Objects, records, texts, zip files and
pickles are refused.

>>> import io, numpy as np
>>> file = io.BytesIO(); np.save(file, np.float32([1, 2]))
>>> read_header(file.getvalue()).view(file.getvalue())
array([1., 2.], dtype=float32)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import lru_cache
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from flwr_regs.wire.text import quoted

MAGIC = b"\x93NUMPY"
LONGEST_HEADER = 1024
"""Bytes of a header; 64 lengths of 10 digits each take some 800."""
MOST_DIMENSIONS = 32
CODES = ("?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
PLAIN = set(map(np.dtype, CODES))
HEADERS: dict[bytes, Callable[..., tuple[tuple[int, ...], bool, np.dtype[Any]]]] = {
    b"\x01\x00": np.lib.format.read_array_header_1_0,
    b"\x02\x00": np.lib.format.read_array_header_2_0,
}
"""Version -> numpy's own reader of a header, which evaluates literals alone."""


class Unreadable(ValueError):
    """Bytes that are not an array of numbers in numpy's format."""


class Header(NamedTuple):
    """What the header of a ``.npy`` says, and where the numbers begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int

    def view(self, data: bytes) -> np.ndarray:
        """Return the numbers of the ``.npy`` that it heads, as a read-only view of its bytes."""
        flat = np.frombuffer(data, self.dtype, offset=self.start)
        flat.flags.writeable = False
        return flat.reshape(self.shape[::-1]).T if self.fortran else flat.reshape(self.shape)


def read_header(data: Any) -> Header:
    """Return the header of a ``.npy``, checked against the bytes that follow it; raise Unreadable."""
    if not isinstance(data, bytes):
        raise Unreadable(f"an array's data must be bytes, not {type(data).__name__}")
    if data[:6] != MAGIC or data[6:8] not in HEADERS:
        raise Unreadable(f"it is not numpy's .npy format: it begins with {quoted(data[:8], 40)}")
    end = data.find(b"\n", 10, LONGEST_HEADER) + 1
    if not end:
        raise Unreadable(f"its header has no end within {LONGEST_HEADER} bytes")
    header = _parsed(data[:end])
    came, needed = len(data) - header.start, _size(header)
    if came != needed:
        what = f"its shape {header.shape} of {header.dtype}"
        raise Unreadable(f"{what} needs {needed} bytes, but {came} came")
    return header


@lru_cache(maxsize=1024)  # all clients send the same headers
def _parsed(head: bytes) -> Header:
    """Return what the first bytes of a ``.npy`` say, up to the end of its header."""
    file = BytesIO(head)
    file.seek(8)
    try:
        shape, fortran, dtype = HEADERS[head[6:8]](file, LONGEST_HEADER)
    except Exception as error:  # whatever a text makes numpy's reader raise
        raise Unreadable(f"its header cannot be read: {quoted(str(error))}") from error
    if dtype not in PLAIN:
        expected = "booleans, integers or floats of at most 64 bits, little endian"
        raise Unreadable(f"its dtype is '{dtype.str}', expected {expected}")
    return Header(dtype, shape, fortran, file.tell())


def _size(header: Header) -> int:
    """Return the bytes of an array; raise Unreadable for more than numpy counts."""
    if (axes := len(header.shape)) > MOST_DIMENSIONS:
        raise Unreadable(f"it has {axes} dimensions, expected at most {MOST_DIMENSIONS}")
    needed, span = math.prod(header.shape), math.prod(max(n, 1) for n in header.shape)
    width = header.dtype.itemsize
    if span * width > sys.maxsize or min(header.shape, default=0) < 0:
        raise Unreadable(f"no array can have its shape {header.shape} of {header.dtype}")
    return needed * width


def npy_bytes(array: np.ndarray) -> int:
    """Return the length of an array's ``.npy``, without writing it."""
    turned = array.flags.f_contiguous and not array.flags.c_contiguous
    return len(_header(array.dtype, array.shape, turned)) + int(array.nbytes)


@lru_cache(maxsize=1024)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> bytes:
    """Return the header of a ``.npy``, the bytes before its numbers."""
    head = BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    fields = {"descr": descr, "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(head, fields)
    return head.getvalue()
