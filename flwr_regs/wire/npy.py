r"""Arrays as they travel: the bytes of a ``.npy``. The one reader of what arrives, and a writer.

``numpy.load`` also reads zip files and evaluates headers. Here the header must match a pattern, and its
shape and dtype must account for every byte that came, before an array is made. The array is a view of these
bytes, so a reply costs no more memory than it took to send. Numbers are booleans, integers and floats of at
most 64 bits, little endian; bfloat16 travels as uint16 (precision.py). Objects, records, texts, zip files
and pickles are refused.

>>> import io, numpy as np
>>> file = io.BytesIO(); np.save(file, np.float32([1, 2]))
>>> read_array(file.getvalue())
array([1., 2.], dtype=float32)
"""

from __future__ import annotations

import math
import re
import struct
import sys
from functools import lru_cache
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from flwr_regs.wire.text import quoted

MAGIC = b"\x93NUMPY"
LONGEST_HEADER = 1024
"""Bytes of a header; 64 lengths of 10 digits each take some 800."""
MOST_DIMENSIONS = 32
SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8)}
"""Kind of number -> the bytes that one may have."""
_LENGTHS = {b"\x01\x00": struct.Struct("<H"), b"\x02\x00": struct.Struct("<I")}
_LENGTHS[b"\x03\x00"] = _LENGTHS[b"\x02\x00"]
"""Version -> the form of a header's length."""
_HEADER = re.compile(
    rb"\{\s*'descr'\s*:\s*'([<>=|]?)([a-zA-Z])(\d{0,4})'\s*,\s*"
    rb"'fortran_order'\s*:\s*(True|False)\s*,\s*"
    rb"'shape'\s*:\s*\(((?:\s*\d{1,19}\s*,)*\s*(?:\d{1,19})?)\s*\)\s*,?\s*\}\s*"
)


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


def read_array(data: Any) -> np.ndarray:
    """Return the array of a ``.npy``, as a read-only view of its bytes; raise Unreadable."""
    return read_header(data).view(data)


def read_header(data: Any) -> Header:
    """Return the header of a ``.npy``, checked against the bytes that follow it; raise Unreadable."""
    if not isinstance(data, bytes):
        raise Unreadable(f"an array's data must be bytes, not {type(data).__name__}")
    length = _LENGTHS.get(data[6:8])
    if data[:6] != MAGIC or length is None:
        raise Unreadable(f"it is not numpy's .npy format: it begins with {quoted(data[:8], 40)}")
    start = 8 + length.size
    if len(data) < start:
        raise Unreadable(f"its header is cut off after {len(data)} bytes")
    (size,) = length.unpack_from(data, 8)
    if size > LONGEST_HEADER or start + size > len(data):
        raise Unreadable(
            f"its header claims {size} bytes, expected at most {min(LONGEST_HEADER, len(data) - start)}"
        )
    dtype, shape, fortran, needed = _parsed(data[start : start + size])
    if (came := len(data) - start - size) != needed:
        raise Unreadable(f"its shape {shape} of {dtype} needs {needed} bytes, but {came} came")
    return Header(dtype, shape, fortran, start + size)


@lru_cache(maxsize=1024)  # all clients send the same headers
def _parsed(text: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Return (dtype, shape, whether the order is Fortran's, bytes of the numbers) of a header's text."""
    if (match := _HEADER.fullmatch(text)) is None:
        raise Unreadable(f"its header is {quoted(text, 120)}, expected dtype, order and shape")
    order, kind, width, fortran, lengths = match.groups()
    dtype = _dtype(order.decode(), kind.decode(), int(width or 0))
    shape = tuple(int(n) for n in lengths.split(b",") if n.strip())
    return dtype, shape, fortran == b"True", _size(dtype, shape)


def _dtype(order: str, kind: str, width: int) -> np.dtype[Any]:
    swapped = order == ">" or (order == "=" and sys.byteorder == "big")
    if width not in SIZES.get(kind, ()) or (swapped and width > 1):
        raise Unreadable(
            f"its dtype is '{order}{kind}{width}', expected booleans, integers or floats of at most 64 "
            "bits, little endian"
        )
    return np.dtype(f"<{kind}{width}")


def _size(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return the bytes of an array; raise Unreadable for more than numpy counts."""
    if len(shape) > MOST_DIMENSIONS:
        raise Unreadable(f"it has {len(shape)} dimensions, expected at most {MOST_DIMENSIONS}")
    needed = span = dtype.itemsize  # Python's integers do not overflow
    for n in shape:
        needed, span = needed * n, span * max(n, 1)
    if span > sys.maxsize:
        raise Unreadable(f"its shape {shape} of {dtype} is beyond what an array can have")
    return needed


def write_array(array: np.ndarray) -> bytes:
    """Return the ``.npy`` of an array; if the array is a view of one, that one, and nothing is copied."""
    if (data := _seen_through(array)) is not None:
        return data
    turned = array.flags.f_contiguous and not array.flags.c_contiguous
    body = np.asarray(array.T if turned else array, order="C")
    return b"".join(
        (_header(body.dtype, array.shape, turned), body.reshape(-1).view(np.uint8).data)
    )


class Blank:
    """An array that is filled in, and then sealed, without a copy of it.

    Parameters
    ----------
    dtype, shape

    Attributes
    ----------
    vector : array
        The numbers as they lie in memory, zeros at first; gone once the array is sealed.
    """

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        header = _header(dtype, shape, False)
        # CPython lends out and hands back the memory of bytes that nothing else holds
        self._file = BytesIO(bytes(len(header) + math.prod(shape) * dtype.itemsize))
        self._file.write(header)
        self.vector = np.frombuffer(self._file.getbuffer(), dtype, offset=len(header))

    def seal(self) -> np.ndarray:
        """Return the array as a read-only view of its ``.npy``."""
        del self.vector
        return read_array(self._file.getvalue())


def npy_bytes(array: np.ndarray) -> int:
    """Return the length of an array's ``.npy``, without writing it."""
    turned = array.flags.f_contiguous and not array.flags.c_contiguous
    return len(_header(array.dtype, array.shape, turned)) + int(array.nbytes)


def _seen_through(array: np.ndarray) -> bytes | None:
    """Return the ``.npy`` that an array is a view of: all of it, unchanged; None if there is none."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, bytes) or base[:6] != MAGIC or not array.size:
        return None
    try:
        whole = read_array(base)
    except Unreadable:
        return None
    same = ("data", "shape", "typestr", "strides")
    part, all_of_it = array.__array_interface__, whole.__array_interface__
    return base if all(part[key] == all_of_it[key] for key in same) else None


@lru_cache(maxsize=1024)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> bytes:
    """Return the header of a ``.npy``, the bytes before its numbers."""
    head = BytesIO()
    fields = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": fortran,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(head, fields)
    return head.getvalue()
